"""KL_GROWTH: the early warning before KL_BLOWUP."""

from __future__ import annotations

from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.detectors.kl_blowup import describe_rise
from kl_guard.detectors.rise import Rise, RiseMonitor
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation


class KLGrowth(Detector):
    """Warns when the rule of KL_BLOWUP holds with a fifth of its floor, the warm-up left out.

    Every run climbs from exactly 0 at first, since policy and reference start equal: without the warm-up that climb
    would look like growth. It never stops a run unless the user sets `halt_on="warn"`.

    Parameters
    ----------
    config:
        The knobs, as for `KLBlowup`, with 0.2 x `abs_floor`.
    monitor:
        The series and its windows, shared with `KLBlowup`; one of its own where None.

    Examples
    --------
    >>> detector = KLGrowth()
    >>> for step in range(1, 60):
    ...     kl = 0.02 if step < 40 else 0.02 * 1.6 ** (step - 40)
    ...     finding = detector.update(Observation(step, kl_mean=kl))
    ...     if finding:
    ...         print(finding.signature, finding.step, finding.severity)
    KL_GROWTH 47 warn
    """

    signature = "KL_GROWTH"

    def __init__(self, config: GuardConfig | None = None, monitor: RiseMonitor | None = None) -> None:
        super().__init__()
        self.monitor = RiseMonitor(config or GuardConfig()) if monitor is None else monitor
        self._rise: Rise | None = None

    def absorb(self, observation: Observation) -> None:
        """Take in an observation of the past: no rule is evaluated."""
        self.monitor.push(observation)

    def _judge(self, observation: Observation) -> Severity | None:
        self.monitor.push(observation)
        self._rise = self.monitor.growth()
        return Severity.WARN if self._rise else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        assert self._rise is not None  # noqa: S101 - `_judge` has just found it
        return describe_rise(self.signature, severity, observation, self.monitor, self._rise)

    def _forget(self) -> None:
        self.monitor.reset()
        self._rise = None

    def _memory(self) -> dict[str, Any]:
        return {"monitor": self.monitor.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self.monitor.load_state_dict(memory["monitor"])
        self._rise = self.monitor.growth()
