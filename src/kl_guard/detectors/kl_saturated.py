"""KL_SATURATED: the maximum that is observed is a ceiling, not the maximum."""

from __future__ import annotations

from typing import Any

from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Recent

LOOKS = 20
AT_LEAST = 10
MOST = 0.6
SAME = 1e-6  # relative
LEAST = 1.0  # nats: ceilings are higher


class KLSaturated(Detector):
    """Says, as `info`, that `kl_max` sits at the same ceiling in most of the last 20 observations.

    Frameworks that clamp KL per token, to 10 most often (verl issue 1779), show that ceiling and hide the maximum.

    Examples
    --------
    >>> detector = KLSaturated()
    >>> findings = [detector.update(Observation(step, kl_mean=0.1, kl_max=10.0)) for step in range(1, 12)]
    >>> next(f for f in findings if f).step
    10
    """

    signature = "KL_SATURATED"

    def __init__(self) -> None:
        super().__init__()
        self._maxima = Recent(LOOKS)
        self._ceiling = 0.0

    def absorb(self, observation: Observation) -> None:
        """Take in an observation of the past: no more than remembered."""
        if observation.kl_max is not None:
            self._maxima.update(observation.step, observation.kl_max)

    def _judge(self, observation: Observation) -> Severity | None:
        self.absorb(observation)
        if len(self._maxima) < AT_LEAST:
            return None
        values = list(self._maxima)
        self._ceiling = max(values)
        at_it = sum(value >= self._ceiling * (1 - SAME) for value in values)
        return Severity.INFO if self._ceiling >= LEAST and at_it >= MOST * len(values) else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        at_it = sum(value >= self._ceiling * (1 - SAME) for value in self._maxima)
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"kl_max was {self._ceiling:g} in {at_it} of the last {len(self._maxima)} observations: it is clamped "
            f"there, and the true maximum is hidden",
            evidence={"ceiling": self._ceiling, "observations": at_it},
        )

    def _forget(self) -> None:
        self._maxima.reset()
        self._ceiling = 0.0

    def _memory(self) -> dict[str, Any]:
        return {"maxima": self._maxima.state_dict(), "ceiling": self._ceiling}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._maxima.load_state_dict(memory["maxima"])
        self._ceiling = memory["ceiling"]
