"""States, lengths and what a debugger shows: as the classes say themselves."""

from __future__ import annotations

import pytest

from kl_guard.stats import (
    ExactSum,
    HorizonWindow,
    Recent,
    RunningRecord,
    Series,
    SlidingMannKendall,
    SortedWindow,
    Streak,
    SumWindow,
    TrendTest,
    fit_hinge,
)


def test_what_a_debugger_shows():
    """The class, and the little that tells where it stands."""
    series = Series(range(6))
    window, record, horizon = SortedWindow(series), RunningRecord(series, skip=1), HorizonWindow(series, 4)
    assert [repr(one) for one in (window, record, horizon)] == [
        "SortedWindow(lo=0, hi=0)",
        "RunningRecord(skip=1, known=1)",
        "HorizonWindow(horizon=4, start=0, stop=0)",
    ]
    window.move(1, 4)
    record.before(6)
    horizon.place()
    recent, streak = Recent(2), Streak()
    recent.update(1, 5.0)
    streak.update(1, True)
    shown = [repr(one) for one in (series, window, record, horizon, recent, streak, ExactSum([1.5]))]
    assert shown == [
        "Series(<6 values>)",
        "SortedWindow(lo=1, hi=4)",
        "RunningRecord(skip=1, known=6)",
        "HorizonWindow(horizon=4, start=2, stop=6)",
        "Recent([5.0])",
        "Streak(length=1)",
        "ExactSum(1.5)",
    ]


@pytest.mark.parametrize("kind", [SortedWindow, SumWindow, SlidingMannKendall])
def test_a_window_covers_nothing_at_first_and_after_a_reset(kind):
    """And an empty stretch is one."""
    window = kind(Series(range(9)))
    assert (len(window), window.lo, window.hi) == (0, 0, 0)
    window.move(2, 7)
    assert len(window) == 5
    window.move(7, 7)
    assert len(window) == 0
    window.reset()
    assert (len(window), window.lo, window.hi) == (0, 0, 0)


def test_a_statistic_of_nothing():
    """An error, not the last one known."""
    ordered, total = SortedWindow(Series([1.0])), SumWindow(Series([1.0]))
    for _ in range(2):
        with pytest.raises(IndexError):
            _ = ordered.median
        with pytest.raises(ZeroDivisionError):
            _ = total.mean
        for window in (ordered, total):
            window.move(0, 1)
            window.reset()


def test_the_state_of_a_horizon():
    """Belongs to a series of its length."""
    series = Series(range(40))
    window = HorizonWindow(series, 32)
    assert (window.start, window.stop, window.early_stop, window.late_start) == (0, 0, 0, 0)
    window.place()
    state = window.state_dict()
    assert state == {"stop": 40}
    again = HorizonWindow(series, 32)
    again.load_state_dict(state)
    assert (again.start, again.stop, again.late_median) == (8, 40, window.late_median)
    series.append(1.0)
    with pytest.raises(ValueError, match="the state is of a series of 40, this one has 41"):
        again.load_state_dict(state)
    window.reset()
    assert (window.start, window.stop, window.early_stop, window.late_start) == (0, 0, 0, 0)


def test_the_last_word_on_a_step_counts():
    """Also when it is not the first that is kept, and after a restart."""
    recent = Recent(3)
    for step, value in [(1, 1.0), (2, 2.0), (3, 3.0), (3, 4.0)]:
        recent.update(step, value)
    assert list(recent) == [1.0, 2.0, 4.0]
    assert recent.full
    again = Recent(3)
    again.load_state_dict(recent.state_dict())
    again.update(3, 5.0)
    assert list(again) == [1.0, 2.0, 5.0]


def test_a_record_of_what_is_not_there():
    """The message has both numbers."""
    with pytest.raises(IndexError, match="no position 7 in a series of 6"):
        RunningRecord(Series(range(6))).before(7)


def test_a_series_that_is_cut_twice_between_two_looks():
    """Each cut is another version, and a cut that takes nothing is none."""
    series = Series(range(10))
    versions = [series.version]
    for length in (10, 12, 8, 6):
        series.truncate(length)
        versions.append(series.version)
    assert versions[0] == versions[1] == versions[2] == 0
    assert len(set(versions)) == 3
    window = SortedWindow(series)
    window.move(0, 6)
    for length, value in [(5, 100.0), (4, 200.0)]:
        series.truncate(length)
        series.append(value)
    window.move(0, 5)
    assert (window.median, series.version) == (2.0, versions[-1] + 2)


def test_an_exact_sum_starts_and_ends_at_nothing():
    """No partial sums of 0 are carried along."""
    total = ExactSum()
    assert total.value == 0
    total.add(2.5)
    total.add(-2.5)
    assert total.state_dict() == {"partials": []}
    total.add(1.0)
    total.reset()
    assert (total.value, total.state_dict()) == (0, {"partials": []})


def test_rising_is_above_nothing_and_below_alpha():
    """Both strictly."""
    assert TrendTest(1, 1.0, 0.0, 0.04).rising(0.05)
    assert not TrendTest(1, 1.0, 0.0, 0.05).rising(0.05)
    assert not TrendTest(0, 1.0, 0.0, 0.0).rising(0.05)


def test_numbers_as_text_and_whole_ones_make_the_same_hinge():
    """Everything is computed in floats."""
    whole = [1, 1, 1, 1, 2, 3, 4]
    assert (
        fit_hinge(whole) == fit_hinge([float(value) for value in whole]) == fit_hinge([str(value) for value in whole])
    )
    assert fit_hinge([1.0] * 4 + [2.0]) is not None
    assert fit_hinge([1.0] * 9) is None
