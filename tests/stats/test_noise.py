"""The scatter of log values about a straight line, against scipy and against what is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress

from kl_guard.stats import log_noise
from kl_guard.stats.noise import MOST

LEAST = 1e-3
positive = st.lists(st.floats(1e-6, 1e6), max_size=60)


def about_a_line(values):
    """The same by scipy, of one half."""
    if len(values) < 3:
        return 0.0
    logs = np.log(np.maximum(values, LEAST))
    times = np.arange(len(logs))
    fit = linregress(times, logs)
    return math.sqrt(np.sum((logs - fit.intercept - fit.slope * times) ** 2) / (len(logs) - 2))


@given(positive, st.integers(0, 20))
def test_equals_a_regression_of_each_half(values, start):
    """The calmer half, from `start` on."""
    start = min(start, len(values))
    window = values[start:]
    half = len(window) // 2
    expected = min(about_a_line(window[:half]), about_a_line(window[half:]))
    assert log_noise(values, LEAST, start) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("length", [6, 7, 8, 9, 41, 80])
def test_equals_it_for_halves_of_any_length(length):
    """From the shortest with a line and something beside it."""
    values = np.exp(np.random.default_rng(length).normal(0, 0.5, length)).tolist()
    half = length // 2
    expected = min(about_a_line(values[:half]), about_a_line(values[half:]))
    assert expected > 0
    assert log_noise(values, LEAST) == pytest.approx(expected, rel=1e-9)


def test_only_the_end_of_a_long_half_counts():
    """What lies more than 128 numbers before the end of a half changes nothing."""
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0, 0.4, 4 * MOST)).tolist()
    wild = [1e6 if i % 2 and (i < MOST or 2 * MOST <= i < 3 * MOST) else x for i, x in enumerate(values)]
    assert log_noise(wild, LEAST) == log_noise(values, LEAST)
    wild[MOST] = 1e6
    assert about_a_line(wild[MOST : 2 * MOST]) > log_noise(values, LEAST)


@pytest.mark.parametrize("deviation", [0.2, 0.8])
def test_measures_noise_and_not_growth_or_a_jump(deviation):
    """Steady growth is no noise; a jump is noise in one half only."""
    rng = np.random.default_rng(1)
    noise = np.exp(rng.normal(0, deviation, 200))
    grown = noise * np.exp2(np.arange(200) / 20)
    jumped = noise * np.where(np.arange(200) < 150, 1.0, 100.0)
    for values in (noise, grown, jumped):
        assert log_noise(values.tolist(), LEAST) == pytest.approx(deviation, rel=0.15)


def test_what_is_near_nothing_has_no_noise():
    """Zeros, negative values and rounding count as the least value."""
    assert log_noise([0.0, -0.5, 1e-9, 0.0, LEAST, 5e-4, 0.0, 0.0], LEAST) == 0.0
