"""The hinge fit equals least squares over every knee."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.stats import fit_hinge


def design(n, knee, flat):
    """Return the columns of the model for one knee."""
    times = np.arange(n)
    columns = [np.ones(n), np.maximum(0, times - knee)] + ([] if flat else [times])
    return np.stack(columns, axis=1)


def brute_force(y, flat):
    """Solve each knee by a general least-squares routine."""
    best = None
    for knee in range(2, len(y) - 2):
        columns = design(len(y), knee, flat)
        weights, *_ = np.linalg.lstsq(columns, y, rcond=None)
        base = 0.0 if flat else weights[2]
        error = float(((y - columns @ weights) ** 2).sum())
        if weights[1] > 0 and base + weights[1] > 0 and (best is None or error < best[0]):
            best = error, knee
    return best


def error_of(hinge, y):
    """The squared error of a fitted hinge, from its own description of itself."""
    times = np.arange(len(y)) - hinge.knee
    model = hinge.level + np.where(times < 0, hinge.base, hinge.slope) * times
    return float(((y - model) ** 2).sum())


@given(st.integers(0, 2**32), st.integers(5, 70), st.floats(0.01, 2), st.floats(0, 1), st.booleans())
def test_equals_brute_force(seed, n, noise, slope, flat):
    """The error of the fit is that of the best of all knees."""
    rng = np.random.default_rng(seed)
    y = noise * rng.normal(size=n) + slope * np.maximum(0, np.arange(n) - rng.integers(0, n))
    fitted, best = fit_hinge(y, flat=flat), brute_force(y, flat)
    assert (fitted is None) == (best is None)
    if best is not None:
        assert error_of(fitted, y) == pytest.approx(best[0], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("base", [0.0, 0.05, -0.05])
@pytest.mark.parametrize("knee", [2, 10, 40, 56])
def test_finds_a_clean_knee_exactly(knee, base):
    """A line, then a steeper one, without noise: the knee itself, its height and both slopes."""
    y = [0.3 + base * (i - knee) + 0.2 * max(0, i - knee) for i in range(60)]
    fitted = fit_hinge(y, flat=base == 0)
    assert fitted.knee == knee
    assert fitted == pytest.approx((knee, 0.3, base, base + 0.2))


def test_a_slow_rise_before_the_knee_misleads_a_flat_fit_only():
    """Why the part before the knee may have a slope of its own."""
    y = [0.04 * i + 0.3 * max(0, i - 40) for i in range(52)]
    assert fit_hinge(y, flat=True).knee < 36
    assert fit_hinge(y, flat=False).knee == 40


@pytest.mark.parametrize("values", [[], [1.0] * 4, [1.0] * 20, list(range(20, 0, -1))])
def test_without_a_rise_there_is_no_hinge(values):
    """Too short, constant or falling: None."""
    assert fit_hinge(values) is None
    assert fit_hinge(values, flat=False) is None
