"""Early quarter, late fifth, trend and record of every horizon equal the batch computation after every prefix."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.stats import HorizonWindow, RunningRecord, Series, Streak
from oracle import mann_kendall
from streams import finite_series


@given(finite_series(max_size=120), st.sampled_from([None, 8, 32, 64]), st.integers(0, 12), st.integers(1, 3))
def test_every_statistic_after_every_prefix(values, horizon, skip, every):
    """Exact order statistics and S; means to 1e-9; whether asked at each prefix or only now and then."""
    skip = skip if horizon is None else 0
    series = Series()
    window = HorizonWindow(series, horizon, skip)
    for n, value in enumerate(values, start=1):
        series.append(value)
        window.place()
        w = np.array(values[:n][skip:] if horizon is None else values[max(0, n - horizon) : n])
        assert len(window) == len(w)
        if n % every or not len(w):
            continue
        early, late = w[: max(5, len(w) // 4)], w[-max(5, len(w) // 5) :]
        assert window.early_median == np.median(early)
        assert window.late_median == np.median(late)
        assert math.isclose(window.late_mean, math.fsum(late) / len(late), rel_tol=1e-9)
        test = window.trend()
        s, variance, _, p = mann_kendall(w[len(w) // 2 :])
        assert (test.s, test.variance) == (s, variance)
        assert math.isclose(test.p, p, rel_tol=1e-9)


@given(finite_series(max_size=60), st.integers(0, 7), st.integers(0, 60))
def test_record_is_the_highest_median_of_five(values, skip, position):
    """Over the numbers before a position, without those skipped."""
    position = min(position, len(values))
    record = RunningRecord(Series(values), skip)
    medians = [float(np.median(values[i - 5 : i])) for i in range(skip + 5, position + 1)]
    assert record.before(position) == max(medians, default=-math.inf)


@given(finite_series(max_size=40), st.integers(0, 20))
def test_record_follows_a_truncated_series(values, keep):
    """A record set in a part that was taken back does not count."""
    series = Series(values)
    record = RunningRecord(series)
    record.before(len(series))
    series.truncate(keep)
    for _ in range(6):
        series.append(-1e13)
    assert record.before(len(series)) == RunningRecord(series).before(len(series))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=40))
def test_streak_counts_steps_by_their_last_word(told):
    """A step told again replaces what was said of it; `since` is where the streak began."""
    streak, step, last_word = Streak(), 0, {}
    for advance, holds in told:
        step += advance
        last_word[step] = holds
        length = streak.update(step, holds)
        run = []
        for s in sorted(last_word, reverse=True):
            if not last_word[s]:
                break
            run.append(s)
        assert length == len(run)
        assert streak.since == (run[-1] if run else None)
