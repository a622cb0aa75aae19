"""How much of a log can be read: some damage is left out, a log that is mostly damage is refused."""

from __future__ import annotations

from kl_guard.logs.text import Notes

PATIENCE = 20  # that cannot be read, before anything that can be: this is no such log


class Tally:
    """Counts what could be read and what could not.

    Parameters
    ----------
    notes:
        Get the first that could not be read, and how many there were.
    kind:
        The kind of note.
    """

    def __init__(self, notes: Notes, kind: str = "damaged") -> None:
        self.good = 0
        self._bad = 0
        self._first = ""
        self._notes = notes
        self._kind = kind

    def __repr__(self) -> str:
        return f"{type(self).__name__}(good={self.good}, bad={self._bad})"

    def bad(self, text: str) -> None:
        """Count something that could not be read; `text` has its place and what is wrong with it.

        Raises
        ------
        ValueError
            With the first one, where nothing can be read.
        """
        self._bad += 1
        self._first = self._first or text
        self._notes.add(self._kind, f"{text}; it is left out")
        if not self.good and self._bad >= PATIENCE:
            self.settle()

    def settle(self) -> None:
        """Say, at the end, whether the rest is worth anything.

        Raises
        ------
        ValueError
            With the first that could not be read, where no more could be read than could not.
        """
        if self._bad and self._bad >= self.good:
            more = f" (and {self._bad - 1} more like it)" if self._bad > 1 else ""
            raise ValueError(f"{self._first}{more}")
