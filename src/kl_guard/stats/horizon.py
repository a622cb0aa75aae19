"""One horizon of a series: its early quarter, its late fifth, and the trend of its second half."""

from __future__ import annotations

from collections.abc import Iterator

from kl_guard.stats.mann_kendall import SlidingMannKendall, TrendTest
from kl_guard.stats.series import Series
from kl_guard.stats.windows import SortedWindow, SumWindow

SHORTEST_HORIZON = 32
FEWEST = 5  # numbers in the early and in the late part, however short the horizon


def trailing_horizons(length: int) -> Iterator[int]:
    """Yield 32, 64, 128, ... as long as they are shorter than `length`.

    Examples
    --------
    >>> list(trailing_horizons(129))
    [32, 64, 128]
    """
    horizon = SHORTEST_HORIZON
    while horizon < length:
        yield horizon
        horizon *= 2


class HorizonWindow:
    """The last `horizon` numbers of a series, or all of them from number `skip` on.

    Of the n numbers in view the early part is the first max(5, n // 4), the late part the last max(5, n // 5), the
    second half those from n // 2 on. `place` follows the series and costs O(1); each statistic is brought up to date
    when it is asked for, in O(log n) per number that has come since (amortised).

    Parameters
    ----------
    series:
        The series to follow.
    horizon:
        How many numbers are in view; None for all.
    skip:
        With `horizon=None`: numbers at the start to leave out.

    Examples
    --------
    >>> series = Series(range(10))
    >>> window = HorizonWindow(series, horizon=None)
    >>> window.place()
    >>> window.early_median, window.late_mean, window.late_median, window.trend().s
    (2.0, 7.0, 7.0, 10)
    """

    __slots__ = (
        "_early",
        "_late",
        "_late_sum",
        "_second_half",
        "_series",
        "_skip",
        "early_stop",
        "horizon",
        "late_start",
        "start",
        "stop",
    )

    def __init__(self, series: Series, horizon: int | None, skip: int = 0) -> None:
        self.horizon = horizon
        self._series = series
        self._skip = skip
        self._early = SortedWindow(series)
        self._late = SortedWindow(series)
        self._late_sum = SumWindow(series)
        self._second_half = SlidingMannKendall(series)
        self.start = self.stop = self.early_stop = self.late_start = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"{type(self).__name__}(horizon={self.horizon}, start={self.start}, stop={self.stop})"

    def place(self) -> None:
        """Look at the series as it is now; a horizon longer than the series is cut to it."""
        self.stop = len(self._series.values)
        self.start = min(self._skip, self.stop) if self.horizon is None else max(0, self.stop - self.horizon)
        length = self.stop - self.start
        self.early_stop = min(self.stop, self.start + max(FEWEST, length // 4))
        self.late_start = max(self.start, self.stop - max(FEWEST, length // 5))

    @property
    def early_median(self) -> float:
        """Median of the early part."""
        self._early.move(self.start, self.early_stop)
        return self._early.median

    @property
    def late_median(self) -> float:
        """Median of the late part."""
        self._late.move(self.late_start, self.stop)
        return self._late.median

    @property
    def late_mean(self) -> float:
        """Mean of the late part."""
        self._late_sum.move(self.late_start, self.stop)
        return self._late_sum.mean

    def trend(self) -> TrendTest:
        """Mann-Kendall test on the second half."""
        self._second_half.move(self.start + len(self) // 2, self.stop)
        return self._second_half.test()

    def reset(self) -> None:
        """Forget everything but the series."""
        for window in (self._early, self._late, self._late_sum, self._second_half):
            window.reset()
        self.start = self.stop = self.early_stop = self.late_start = 0

    def state_dict(self) -> dict[str, int]:
        """Return where the window stands; its numbers are the series' state."""
        return {"stop": self.stop}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over a place that `state_dict` returned, for a series in the same state."""
        self.reset()
        if state["stop"] != len(self._series):
            raise ValueError(f"the state is of a series of {state['stop']}, this one has {len(self._series)}")
        self.place()
