"""Windows with moving bounds equal the batch computation, and refuse what is not there."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.stats import Series, SlidingMannKendall, SortedWindow, SumWindow
from streams import finite_series


@st.composite
def moves(draw):
    """A series and a walk of both bounds over it, mostly forward, sometimes far or backward."""
    values = draw(finite_series(max_size=80))
    bounds = []
    lo = hi = 0
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.integers(0, 5)) == 0:
            lo = draw(st.integers(0, len(values) - 1))
            hi = draw(st.integers(lo + 1, len(values)))
        else:
            hi = min(len(values), hi + draw(st.integers(0, 4)) + (hi == 0))
            lo = min(max(0, hi - 1), lo + draw(st.integers(0, 4)))
        bounds.append((lo, hi))
    return values, bounds


@given(moves())
def test_median_and_mean_equal_batch(case):
    """Exactly for the median, to 1e-9 relative for the mean, wherever the bounds go."""
    values, bounds = case
    series = Series(values)
    ordered, summed = SortedWindow(series), SumWindow(series)
    for lo, hi in bounds:
        ordered.move(lo, hi)
        summed.move(lo, hi)
        assert ordered.median == statistics.median(values[lo:hi])
        assert math.isclose(summed.mean, math.fsum(values[lo:hi]) / (hi - lo), rel_tol=1e-12)


@given(moves(), st.integers(0, 30))
def test_truncation_of_the_series_is_noticed(case, keep):
    """Numbers that were taken away and replaced do not linger in a window."""
    values, bounds = case
    series = Series(values)
    windows = SortedWindow(series), SumWindow(series), SlidingMannKendall(series)
    for window in windows:
        window.move(*bounds[-1])
    series.truncate(keep)
    for value in values:
        series.append(-value)
    lo, hi = bounds[-1]
    for window in windows:
        window.move(lo, hi)
    assert windows[0].median == statistics.median(series.values[lo:hi])
    fresh = SlidingMannKendall(series)
    fresh.move(lo, hi)
    assert (windows[2].s, windows[2].variance) == (fresh.s, fresh.variance)


@given(moves())
def test_state_goes_through_json(case):
    """A window restored over a restored series is the same window."""
    values, bounds = case
    series = Series(values)
    for kind, read in ((SortedWindow, "median"), (SumWindow, "mean"), (SlidingMannKendall, "s")):
        window = kind(series)
        window.move(*bounds[-1])
        again = Series()
        again.load_state_dict(json.loads(json.dumps(series.state_dict())))
        copy = kind(again)
        copy.load_state_dict(json.loads(json.dumps(window.state_dict())))
        assert getattr(copy, read) == getattr(window, read)


@pytest.mark.parametrize(("lo", "hi"), [(0, 4), (-1, 2), (2, 1)])
def test_bounds_outside_the_series_are_refused(lo, hi):
    """A window cannot cover numbers that do not exist."""
    with pytest.raises(IndexError, match="in a series of 3"):
        SortedWindow(Series([1.0, 2.0, 3.0])).move(lo, hi)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_series_takes_finite_numbers_only(value):
    """Non-finite values are judged before they reach statistics."""
    with pytest.raises(ValueError, match="finite numbers only"):
        Series([value])


def test_sums_of_the_largest_values_do_not_overflow():
    """Values near the end of the float range are clipped, so means stay finite."""
    series = Series([1.7e308] * 100)
    window = SumWindow(series)
    window.move(0, 100)
    assert window.mean == 1e300
