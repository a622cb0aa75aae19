"""KL_PLATEAU: far from the reference, and staying there."""

from __future__ import annotations

import math
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.detectors.rise import RiseMonitor
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Streak

LASTING = 20


class KLPlateau(Detector):
    """Warns when KL has been above `plateau_level` for 20 observations without growth that KL_BLOWUP would see.

    A run may blow up before there is anything to compare with, or reach a high level slowly: no trend is left to test,
    and the policy is far from its reference all the same. Token means only.

    Parameters
    ----------
    config:
        `plateau_level` 1.0 nats per token, `kl_kind`.
    monitor:
        The series and its windows, shared with `KLBlowup`; one of its own where None.

    Examples
    --------
    >>> detector = KLPlateau()
    >>> findings = [detector.update(Observation(step, kl_mean=1.5)) for step in range(1, 30)]
    >>> next(f for f in findings if f).step
    20
    """

    signature = "KL_PLATEAU"

    def __init__(self, config: GuardConfig | None = None, monitor: RiseMonitor | None = None) -> None:
        super().__init__()
        self._config = config or GuardConfig()
        self._owns = monitor is None
        self.monitor = RiseMonitor(self._config) if monitor is None else monitor
        self._above = Streak()

    def absorb(self, observation: Observation) -> None:
        """Take in an observation of the past: no rule is evaluated."""
        self.monitor.push(observation)
        self._lasts(observation)

    def _lasts(self, observation: Observation) -> bool:
        kl = observation.kl_mean
        above = self._config.token_mean and kl is not None and self._config.plateau_level < kl < math.inf
        return self._above.update(observation.step, above) >= LASTING

    def _judge(self, observation: Observation) -> Severity | None:
        self.monitor.push(observation)
        return Severity.WARN if self._lasts(observation) and self.monitor.critical() is None else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        level = f"{self._config.plateau_level:g} nat{'' if self._config.plateau_level == 1 else 's'} per token"
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"KL has been above {level} for {self._above.length} observations (now {observation.kl_mean:.4g}) without "
            f"growing: the policy is far from the reference and stays there",
            onset_step=self._above.since,
            evidence={"kl_mean": observation.kl_mean, "observations": self._above.length},
        )

    def _forget(self) -> None:
        if self._owns:
            self.monitor.reset()
        self._above.reset()

    def _memory(self) -> dict[str, Any]:
        return {"monitor": self.monitor.state_dict() if self._owns else None, "above": self._above.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        if memory["monitor"] is not None:
            self.monitor.load_state_dict(memory["monitor"])
        self._above.load_state_dict(memory["above"])
