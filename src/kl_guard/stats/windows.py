"""Windows over a series whose two bounds move: order statistics and sums.

A window only works when it is asked to: `move` brings it up to date with as many insertions and removals as the bounds
have moved, or rebuilds it where that is cheaper. Work is so amortised O(log n) per step of a bound, and a window that
nobody asks for costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import Any

from sortedcontainers import SortedList

from kl_guard.stats.exact_sum import ExactSum
from kl_guard.stats.series import Series

SLACK = 8  # a rebuild of a tiny window is not worth avoiding insertions for


class Window(ABC):
    """Numbers `lo` to `hi - 1` of a series, with a statistic that follows both bounds."""

    __slots__ = ("_known", "_series", "_version", "hi", "lo")

    def __init__(self, series: Series) -> None:
        self._series = series
        self._version = series.version
        self._known: float | None = None  # the statistic where the window stands, once it was asked for
        self.lo = self.hi = 0

    def __len__(self) -> int:
        return self.hi - self.lo

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lo={self.lo}, hi={self.hi})"

    def move(self, lo: int, hi: int) -> None:
        """Cover `series[lo:hi]`.

        Raises
        ------
        IndexError
            If the series does not hold those numbers.
        """
        old_lo, old_hi = self.lo, self.hi
        if lo == old_lo and hi == old_hi and self._version == self._series.version:
            return
        values = self._series.values
        if not 0 <= lo <= hi <= len(values):
            raise IndexError(f"no numbers {lo} to {hi} in a series of {len(values)}")
        stale = self._version != self._series.version or lo < old_lo or hi < old_hi or lo >= old_hi
        if stale or (hi - old_hi) + (lo - old_lo) > (hi - lo) // 4 + SLACK:
            self._rebuild(values[lo:hi])
            self._version = self._series.version
        else:
            for i in range(old_hi, hi):
                self._insert(values[i])
            for i in range(old_lo, lo):
                self._remove(values[i])
        self.lo, self.hi = lo, hi
        self._known = None

    def reset(self) -> None:
        """Cover nothing."""
        self._rebuild(array("d"))
        self.lo = self.hi = 0
        self._known = None

    def state_dict(self) -> dict[str, Any]:
        """Return the bounds; the numbers themselves are the series' state."""
        return {"lo": self.lo, "hi": self.hi}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over bounds that `state_dict` returned, for a series in the same state."""
        self.reset()
        self.move(int(state["lo"]), int(state["hi"]))

    @abstractmethod
    def _rebuild(self, values: array[float]) -> None: ...

    @abstractmethod
    def _insert(self, value: float) -> None: ...

    @abstractmethod
    def _remove(self, value: float) -> None: ...


class SortedWindow(Window):
    """Exact median of a window; O(log n) per step of a bound.

    Examples
    --------
    >>> window = SortedWindow(Series([5.0, 1.0, 4.0, 2.0]))
    >>> window.move(1, 4)
    >>> window.median
    2.0
    """

    __slots__ = ("_sorted",)

    def __init__(self, series: Series) -> None:
        super().__init__(series)
        self._sorted: SortedList[float] = SortedList()

    @property
    def median(self) -> float:
        """The median (of an even number of values: the mean of the middle two).

        Raises
        ------
        IndexError
            If the window is empty.
        """
        if self._known is None:
            ordered = self._sorted
            middle, odd = divmod(len(ordered), 2)
            low, high = ordered[middle - (not odd)], ordered[middle]
            self._known = float(low if odd else (low + high) / 2)
        return self._known

    def _rebuild(self, values: array[float]) -> None:
        self._sorted = SortedList(values)

    def _insert(self, value: float) -> None:
        self._sorted.add(value)

    def _remove(self, value: float) -> None:
        self._sorted.remove(value)


class SumWindow(Window):
    """Mean of a window from an exact sum; O(1) per step of a bound, no drift however long the run.

    Examples
    --------
    >>> window = SumWindow(Series([1e16, 1.0, 2.0]))
    >>> window.move(0, 3); window.move(1, 3)
    >>> window.mean
    1.5
    """

    __slots__ = ("_sum",)

    def __init__(self, series: Series) -> None:
        super().__init__(series)
        self._sum = ExactSum()

    @property
    def mean(self) -> float:
        """The arithmetic mean.

        Raises
        ------
        ZeroDivisionError
            If the window is empty.
        """
        if self._known is None:
            self._known = self._sum.value / (self.hi - self.lo)
        return self._known

    def _rebuild(self, values: array[float]) -> None:
        self._sum.assign(values)

    def _insert(self, value: float) -> None:
        self._sum.add(value)

    def _remove(self, value: float) -> None:
        self._sum.add(-value)
