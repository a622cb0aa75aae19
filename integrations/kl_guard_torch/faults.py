"""Keeping the guard's own faults away from training, and from the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kl_guard_torch import ranks

logger = logging.getLogger("kl_guard")

T = TypeVar("T")


class Faults:
    """Does the guard's work so that what it raises is logged, once for each place, and goes no further."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({sorted(self._said)})"

    def guarded(self, work: Callable[..., T], *args: Any) -> T | None:
        """Do something of the guard's; whatever it raises is logged once, and training goes on."""
        try:
            return work(*args)
        except Exception:
            self.fault(getattr(getattr(work, "func", work), "__name__", repr(work)).strip("_"))
            return None

    def shared(self, value: T) -> list[T]:
        """Return the value of every rank; all must call this at the same place."""
        try:
            return ranks.gather(value)
        except Exception:
            self.fault("asking the other ranks")
            return [value]

    def fault(self, doing: str) -> None:
        """Log the exception at hand, once for what was being done."""
        if doing not in self._said:
            self._said.add(doing)
            logger.exception("kl-guard: a fault of the guard itself (%s); training goes on, the guard is blind", doing)

    def say_once(self, key: str, text: str) -> None:
        """Log a warning, once for each key."""
        if key not in self._said:
            self._said.add(key)
            logger.warning("kl-guard: %s", text)
