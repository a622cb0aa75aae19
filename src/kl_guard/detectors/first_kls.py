"""What the two signatures have in common that compare KL behind a step with what was recorded there."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from typing import Any, ClassVar

from kl_guard.detectors.base import Detector
from kl_guard.findings import Severity
from kl_guard.observation import Observation


class FirstKLs(Detector):
    """Collects the first `looks` finite KLs behind a step and compares them; silent until `expect` is called."""

    looks: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self._after: int | None = None
        self._recorded = 0.0
        self._seen: list[tuple[int, float]] = []

    def expect(self, step: int, recorded_kl: float | None) -> None:
        """Judge what comes after `step`; without a recorded KL there is nothing to compare with."""
        self._forget()
        if recorded_kl is not None:
            self._after, self._recorded = step, recorded_kl

    def _judge(self, observation: Observation) -> Severity | None:
        kl = observation.kl_mean
        if self._after is None or observation.step <= self._after:
            return None
        new = not self._seen or observation.step > self._seen[-1][0]
        if kl is not None and math.isfinite(kl) and new and len(self._seen) < self.looks:
            self._seen.append((observation.step, kl))
        return self._compare() if len(self._seen) == self.looks else None

    @abstractmethod
    def _compare(self) -> Severity | None:
        """Return how bad it is that the KLs seen are what they are, None where they are as they should be."""

    def _median(self) -> float:
        return statistics.median(kl for _, kl in self._seen)

    def _forget(self) -> None:
        self._after, self._recorded, self._seen = None, 0.0, []

    def _memory(self) -> dict[str, Any]:
        return {"after": self._after, "recorded": self._recorded, "seen": [list(pair) for pair in self._seen]}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._after, self._recorded = memory["after"], memory["recorded"]
        self._seen = [(int(step), float(kl)) for step, kl in memory["seen"]]
