"""REFERENCE_RESET: after a resume the policy is compared with itself."""

from __future__ import annotations

import math
import statistics
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation

LOOKS = 3  # the median of so many is compared
SHARE = 0.1
CLEARLY = 0.01  # nats per token: a smaller KL says nothing when it falls


class ReferenceReset(Detector):
    """Warns when KL right after a resume is less than a tenth of what was recorded at that checkpoint.

    A reference that is captured after the checkpoint was loaded is the resumed policy itself: KL begins at 0 again, and
    what the run had moved so far does not count any more (NeMo-RL issue 2955). Silent until `expect` is called.

    Parameters
    ----------
    config:
        `kl_kind`: the least KL that counts holds for token means only.

    Examples
    --------
    >>> detector = ReferenceReset()
    >>> detector.expect(40, recorded_kl=0.2)
    >>> [detector.update(Observation(step, kl_mean=0.001)) is not None for step in range(41, 44)]
    [False, False, True]
    """

    signature = "REFERENCE_RESET"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._least = CLEARLY if (config or GuardConfig()).token_mean else 0.0
        self._after: int | None = None
        self._recorded = 0.0
        self._seen: list[tuple[int, float]] = []

    def expect(self, step: int, recorded_kl: float | None) -> None:
        """Judge what comes after `step`; without a recorded KL there is nothing to compare with."""
        self._forget()
        if recorded_kl is not None and recorded_kl > self._least:
            self._after, self._recorded = step, recorded_kl

    def _judge(self, observation: Observation) -> Severity | None:
        kl = observation.kl_mean
        if self._after is None or observation.step <= self._after:
            return None
        new = not self._seen or observation.step > self._seen[-1][0]
        if kl is not None and math.isfinite(kl) and new and len(self._seen) < LOOKS:
            self._seen.append((observation.step, kl))
        if len(self._seen) < LOOKS:
            return None
        return Severity.WARN if self._median() < SHARE * self._recorded else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"after resuming at step {self._after} KL is {self._median():.4g} (median of {LOOKS}); before, it was "
            f"{self._recorded:.4g} there: the reference is not the one of before",
            onset_step=self._seen[0][0],
            evidence={"median_kl": self._median(), "recorded_kl": self._recorded, "resumed_at": self._after},
        )

    def _median(self) -> float:
        return statistics.median(kl for _, kl in self._seen)

    def _forget(self) -> None:
        self._after, self._recorded, self._seen = None, 0.0, []

    def _memory(self) -> dict[str, Any]:
        return {"after": self._after, "recorded": self._recorded, "seen": [list(pair) for pair in self._seen]}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._after, self._recorded = memory["after"], memory["recorded"]
        self._seen = [(int(step), float(kl)) for step, kl in memory["seen"]]
