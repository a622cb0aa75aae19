"""REFERENCE_CHANGED: the reference is not the model that it was."""

from __future__ import annotations

from typing import Any

from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation


class ReferenceChanged(Detector):
    """Warns when the checksum over some of the reference's parameters is another one than before.

    Then KL is measured against something that moves, and its level says nothing. Where the trainer moves the reference
    on purpose (`sync_ref_model`), the adapter observes no checksum.

    Examples
    --------
    >>> detector = ReferenceChanged()
    >>> [detector.update(Observation(step, reference_checksum=value)) is None for step, value in [(1, 0.5), (2, 0.6)]]
    [True, False]
    """

    signature = "REFERENCE_CHANGED"

    def __init__(self) -> None:
        super().__init__()
        self._known: float | None = None
        self._step = 0
        self._changed: int | None = None

    def _judge(self, observation: Observation) -> Severity | None:
        checksum = observation.reference_checksum
        if checksum is None:
            return None
        if self._known is not None and checksum != self._known and observation.step > self._step:
            self._changed = observation.step
        same = self._known is None or checksum == self._known
        if same or observation.step > self._step:
            self._known, self._step = checksum, observation.step
        return Severity.WARN if self._changed == observation.step else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        return Finding(
            self.signature,
            severity,
            observation.step,
            "the parameters of the reference are not those of before: KL is measured against something that moves",
            onset_step=observation.step,
            evidence={"reference_checksum": observation.reference_checksum},
        )

    def _forget(self) -> None:
        self._known, self._step, self._changed = None, 0, None

    def _memory(self) -> dict[str, Any]:
        return {"known": self._known, "step": self._step, "changed": self._changed}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._known, self._step, self._changed = memory["known"], memory["step"], memory["changed"]
