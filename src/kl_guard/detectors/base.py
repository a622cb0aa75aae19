"""What every detector is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation


class Detector(ABC):
    """Watches for one signature: observations in, at most one finding out for each severity.

    `update` judges an observation and returns a finding the first time the condition holds, and again only when it has
    become worse. `active` says whether the condition holds now. The same step may come again with more known about it.
    A subclass writes `_judge` and `_finding`, and keeps what it remembers in `_memory`.
    """

    signature: ClassVar[str]

    def __init__(self) -> None:
        self.active = False
        self._said: Severity | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(active={self.active}, said={self._said and self._said.value!r})"

    def update(self, observation: Observation) -> Finding | None:
        """Judge one observation; return what is new about it."""
        severity = self._judge(observation)
        self.active = severity is not None
        if severity is None or (self._said is not None and severity <= self._said):
            return None
        finding = self._finding(observation, severity)
        self._said = severity
        return finding

    def absorb(self, observation: Observation) -> None:
        """Take in an observation of the past: remembered, not reported."""
        self.active = self._judge(observation) is not None

    @property
    def said(self) -> Severity | None:
        """The highest severity reported so far."""
        return self._said

    def rearm(self, said: Severity | None = None) -> None:
        """Go back to having said no more than `said`, so that a condition that still holds is reported again."""
        self._said = said

    def resumed(self) -> None:  # noqa: B027 - most detectors have nothing to do
        """What comes next is not the beginning of a run."""

    def reset(self) -> None:
        """Forget everything."""
        self.active = False
        self._said = None
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-ready values."""
        return {"active": self.active, "said": self._said and self._said.value, "memory": self._memory()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self.active = state["active"]
        self._said = None if state["said"] is None else Severity(state["said"])
        self._recall(state["memory"])

    @abstractmethod
    def _judge(self, observation: Observation) -> Severity | None:
        """Return how bad the condition is at this observation, None where it does not hold."""

    @abstractmethod
    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        """Put the condition, which holds now, into words and figures."""

    @abstractmethod
    def _forget(self) -> None: ...

    @abstractmethod
    def _memory(self) -> dict[str, Any]: ...

    @abstractmethod
    def _recall(self, memory: dict[str, Any]) -> None: ...
