"""ENTROPY_COLLAPSE: the policy has stopped exploring."""

from __future__ import annotations

import math
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import First, Streak

EARLY = 5  # observations whose median is the start
HIGH, LOW = 1.0, 0.25  # nats per token
SHARE = 0.1


class EntropyCollapse(Detector):
    """Warns when entropy is below 0.25 after a start above 1.0, or below a tenth of its start, `sustain` times on end.

    The start is the median of the first five observations; nats per token. A policy without entropy samples the same
    completion again and again, and there is nothing left to learn from; KL may or may not show it.

    Parameters
    ----------
    config:
        `sustain` 3 is the only knob.

    Examples
    --------
    >>> detector = EntropyCollapse()
    >>> entropies = [1.4] * 10 + [0.2] * 5
    >>> findings = [detector.update(Observation(step, entropy=h)) for step, h in enumerate(entropies, start=1)]
    >>> next(f for f in findings if f).step
    13
    """

    signature = "ENTROPY_COLLAPSE"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._sustain = (config or GuardConfig()).sustain
        self._early = First(EARLY)
        self._low = Streak()

    def _judge(self, observation: Observation) -> Severity | None:
        entropy = observation.entropy
        if entropy is None or not math.isfinite(entropy):
            return None
        self._early.update(observation.step, entropy)
        start = self._early.median
        known = self._early.full and start > 0
        low = known and (entropy < SHARE * start or (start > HIGH and entropy < LOW))
        return Severity.WARN if self._low.update(observation.step, low) >= self._sustain else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        start = self._early.median
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"entropy fell from {start:.3g} to {observation.entropy:.3g} nats per token: the policy hardly "
            f"explores any more",
            onset_step=self._low.since,
            evidence={"entropy": observation.entropy, "start": start, "observations": self._low.length},
        )

    def _forget(self) -> None:
        self._early.reset()
        self._low.reset()

    def _memory(self) -> dict[str, Any]:
        return {"early": self._early.state_dict(), "low": self._low.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._early.load_state_dict(memory["early"])
        self._low.load_state_dict(memory["low"])
