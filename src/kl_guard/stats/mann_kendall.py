"""The Mann-Kendall trend test over a window whose bounds move."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from sortedcontainers import SortedList

from kl_guard.stats.series import Series
from kl_guard.stats.windows import Window


class TrendTest(NamedTuple):
    """Result of one Mann-Kendall test.

    `s` counts rising pairs less falling pairs, `variance` is that of `s` without trend and corrected for ties,
    `z` is standard normal without trend (with continuity correction), `p` is two-sided.
    """

    s: int
    variance: float
    z: float
    p: float

    def rising(self, alpha: float) -> bool:
        """Whether the trend is upward with `p < alpha`."""
        return self.s > 0 and self.p < alpha


class SlidingMannKendall(Window):
    """S and its tie-corrected variance, kept up to date in O(log n) per step of a bound.

    A number that enters on the right makes a pair with every number in the window, one that leaves on the left
    takes its pairs away; both are counts of smaller and larger numbers in the sorted window. Everything is integer
    arithmetic, so nothing drifts.

    References
    ----------
    Mann, "Nonparametric tests against trend", Econometrica 13 (1945); Kendall, "Rank Correlation Methods" (1975).

    Examples
    --------
    >>> trend = SlidingMannKendall(Series([9.0, 1.0, 2.0, 2.0, 3.0, 5.0]))
    >>> trend.move(1, 6)
    >>> trend.s, trend.test().rising(alpha=0.05)
    (9, True)
    """

    __slots__ = ("_sorted", "_ties", "s")

    def __init__(self, series: Series) -> None:
        super().__init__(series)
        self._sorted: SortedList[float] = SortedList()
        self._ties = 0  # sum of t (t - 1) (2 t + 5) over groups of t equal numbers
        self.s = 0

    @property
    def variance(self) -> float:
        """Variance of S without trend: (n (n - 1) (2 n + 5) - ties) / 18."""
        n = len(self._sorted)
        return (n * (n - 1) * (2 * n + 5) - self._ties) / 18

    def test(self) -> TrendTest:
        """Return the test on the window as it stands; with no variance (constant or tiny), z = 0 and p = 1."""
        variance = self.variance
        if self.s == 0 or variance <= 0:
            return TrendTest(self.s, variance, 0.0, 1.0)
        z = (self.s - math.copysign(1, self.s)) / math.sqrt(variance)
        return TrendTest(self.s, variance, z, math.erfc(abs(z) / math.sqrt(2)))

    def _rebuild(self, values: array[float]) -> None:
        self._sorted = SortedList()
        self._ties = self.s = 0
        for value in values:
            self._insert(value)

    def _insert(self, value: float) -> None:
        ordered = self._sorted
        left, right = ordered.bisect_left(value), ordered.bisect_right(value)
        equal = right - left
        if equal:
            self._ties += 6 * equal * (equal + 2)  # t (t - 1) (2 t + 5) at t = equal + 1, less that at t = equal
        self.s += left - (len(ordered) - right)
        ordered.add(value)

    def _remove(self, value: float) -> None:
        """Take away the oldest number, `value`: its pairs are with all the others, which came later."""
        ordered = self._sorted
        left, right = ordered.bisect_left(value), ordered.bisect_right(value)
        equal = right - left - 1
        if equal:
            self._ties -= 6 * equal * (equal + 2)
        self.s -= (len(ordered) - right) - left
        ordered.remove(value)
