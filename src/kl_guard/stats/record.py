"""The highest level a series has held so far."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right

from kl_guard.stats.series import Series

WIDTH = 5


class RunningRecord:
    """Highest running median of 5 before any position of a series; O(1) per number, and memory for each new record.

    A median of 5 ignores two outliers in a row, so the record is a level the series has held, not a spike.

    Parameters
    ----------
    series:
        The series to follow.
    skip:
        Numbers at the start to leave out.

    Examples
    --------
    >>> series = Series([1, 2, 9, 2, 3, 8, 8, 8])
    >>> record = RunningRecord(series)
    >>> record.before(4), record.before(5), record.before(8)
    (-inf, 2.0, 8.0)
    """

    __slots__ = ("_ends", "_highest", "_known", "_series", "_skip", "_version")

    def __init__(self, series: Series, skip: int = 0) -> None:
        self._series = series
        self._skip = skip
        self._version = series.version
        self._known = skip  # position up to which the series was read
        self._ends = array("q")  # position behind the numbers that set the record of `_highest`
        self._highest = array("d")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(skip={self._skip}, known={self._known})"

    def before(self, position: int) -> float:
        """Return the record over numbers `skip` to `position - 1`, or -inf where they are fewer than 5.

        Raises
        ------
        IndexError
            If the series does not reach `position`.
        """
        if position > len(self._series):
            raise IndexError(f"no position {position} in a series of {len(self._series)}")
        if position - self._skip < WIDTH:
            return -math.inf
        self._follow()
        return self._highest[bisect_right(self._ends, position) - 1]

    def reset(self) -> None:
        """Forget everything; the series is read again when needed."""
        self._known = self._skip
        del self._ends[:], self._highest[:]

    def _follow(self) -> None:
        values, ends, highest = self._series.values, self._ends, self._highest
        if self._version != self._series.version:
            self.reset()
            self._version = self._series.version
        for end in range(max(self._known, self._skip + WIDTH - 1) + 1, len(values) + 1):
            level = sorted(values[end - WIDTH : end])[WIDTH // 2]
            if not highest or level > highest[-1]:
                ends.append(end)
                highest.append(level)
        self._known = len(values)
