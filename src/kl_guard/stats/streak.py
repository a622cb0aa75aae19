"""How many steps in a row something has been so."""

from __future__ import annotations

from typing import Any


class Streak:
    """Length of the current run of steps on which a condition held, and the step it began at (`since`).

    A step may be told more than once, as more becomes known about it: the last word counts.

    Examples
    --------
    >>> streak = Streak()
    >>> streak.update(1, True), streak.update(2, True), streak.update(2, False), streak.update(3, True)
    (1, 2, 0, 1)
    """

    __slots__ = ("_before", "_since_before", "_step", "length", "since")

    def __init__(self) -> None:
        self.length = self._before = 0
        self.since: int | None = None
        self._since_before: int | None = None
        self._step: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length})"

    def update(self, step: int, holds: bool) -> int:
        """Say whether the condition holds at `step`; return the length of the streak that ends there."""
        if step != self._step:
            self._before, self._since_before, self._step = self.length, self.since, step
        self.length = self._before + 1 if holds else 0
        self.since = (self._since_before if self._before else step) if holds else None
        return self.length

    def reset(self) -> None:
        """Forget everything."""
        self.length = self._before = 0
        self.since = self._since_before = self._step = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-ready values."""
        return {
            "length": self.length,
            "since": self.since,
            "before": self._before,
            "since_before": self._since_before,
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self.length, self.since, self._step = state["length"], state["since"], state["step"]
        self._before, self._since_before = state["before"], state["since_before"]
