"""The sliding Mann-Kendall test equals the definition and the reference implementation."""

import math
import random

import pymannkendall
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.stats import Series, SlidingMannKendall
from oracle import mann_kendall
from streams import finite_series


@given(finite_series(max_size=60), st.integers(2, 30))
def test_equals_the_definition_at_every_place_of_a_sliding_window(values, width):
    """S and variance are exact integers, z and p follow, with ties and constants and spikes."""
    trend = SlidingMannKendall(Series(values))
    for hi in range(1, len(values) + 1):
        lo = max(0, hi - width)
        trend.move(lo, hi)
        s, variance, z, p = mann_kendall(values[lo:hi])
        test = trend.test()
        assert (test.s, test.variance) == (s, variance)
        assert math.isclose(test.z, z, rel_tol=1e-12)
        assert math.isclose(test.p, p, rel_tol=1e-9)


@given(finite_series(max_size=60))
def test_equals_pymannkendall(values):
    """The same S, variance, z and p as `pymannkendall.original_test`."""
    if len(values) < 3 or len(set(values)) == 1:
        return  # the peer divides by zero there
    peer = pymannkendall.original_test(values)
    trend = SlidingMannKendall(Series(values))
    trend.move(0, len(values))
    test = trend.test()
    assert test.s == peer.s
    assert math.isclose(test.variance, peer.var_s, rel_tol=1e-12)
    assert math.isclose(test.z, peer.z, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(test.p, peer.p, rel_tol=1e-6, abs_tol=1e-12)
    assert (test.rising(0.05), test.s < 0 and test.p < 0.05) == (peer.trend == "increasing", peer.trend == "decreasing")


def test_equals_pymannkendall_on_a_long_noisy_window():
    """After 3,000 numbers have passed through a window of 500, nothing has drifted."""
    rng = random.Random(0)
    values = [round(rng.gauss(0.3, 0.1), 2) for _ in range(3000)]
    trend = SlidingMannKendall(Series(values))
    for hi in range(1, 3001):
        trend.move(max(0, hi - 500), hi)
    peer = pymannkendall.original_test(values[-500:])
    assert trend.s == peer.s
    assert trend.variance == pytest.approx(peer.var_s, rel=1e-12)


@pytest.mark.parametrize("values", [[], [1.0], [2.0] * 50])
def test_without_variance_there_is_no_trend(values):
    """Empty, single and constant windows are not rising and raise nothing."""
    trend = SlidingMannKendall(Series(values))
    trend.move(0, len(values))
    test = trend.test()
    assert (test.s, test.z, test.p) == (0, 0.0, 1.0)
    assert not test.rising(0.99)
