"""What the two signatures have in common that compare KL behind a step with what was recorded there."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from kl_guard.detectors.base import Detector
from kl_guard.findings import Severity
from kl_guard.observation import Observation
from kl_guard.stats import First


class FirstKLs(Detector):
    """Collects the first `looks` finite KLs behind a step and compares them; silent until `expect` is called."""

    looks: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self._after: int | None = None
        self._recorded = 0.0
        self._seen = First(self.looks)

    def expect(self, step: int, recorded_kl: float | None) -> None:
        """Judge what comes after `step`; without a recorded KL there is nothing to compare with."""
        self._forget()
        if recorded_kl is not None:
            self._after, self._recorded = step, recorded_kl

    def _judge(self, observation: Observation) -> Severity | None:
        kl = observation.kl_mean
        if self._after is None or observation.step <= self._after:
            return None
        if kl is not None and math.isfinite(kl):
            self._seen.update(observation.step, kl)
        return self._compare() if self._seen.full else None

    @abstractmethod
    def _compare(self) -> Severity | None:
        """Return how bad it is that the KLs seen are what they are, None where they are as they should be."""

    def _forget(self) -> None:
        self._after, self._recorded = None, 0.0
        self._seen.reset()

    def _memory(self) -> dict[str, Any]:
        return {"after": self._after, "recorded": self._recorded, "seen": self._seen.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._after, self._recorded = memory["after"], memory["recorded"]
        self._seen.load_state_dict(memory["seen"])
