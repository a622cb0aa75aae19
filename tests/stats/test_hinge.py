"""The hinge fit equals least squares over every knee."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.stats import fit_hinge


def brute_force(y):
    """Solve each knee by a general least-squares routine."""
    best, n = None, len(y)
    for knee in range(2, n - 2):
        design = np.c_[np.ones(n), np.maximum(0, np.arange(n) - knee)]
        (level, slope), *_ = np.linalg.lstsq(design, y, rcond=None)
        error = float(((y - design @ [level, slope]) ** 2).sum())
        if slope > 0 and (best is None or error < best[0]):
            best = error, knee, level, slope
    return best


@given(st.integers(0, 2**32), st.integers(5, 70), st.floats(0.01, 2), st.floats(0, 1))
def test_equals_brute_force(seed, n, noise, slope):
    """The same error as the best of all knees, with its level and slope."""
    rng = np.random.default_rng(seed)
    y = noise * rng.normal(size=n) + slope * np.maximum(0, np.arange(n) - rng.integers(0, n))
    fitted, best = fit_hinge(y), brute_force(y)
    if best is None:
        assert fitted is None
        return
    error = float(((y - fitted.level - fitted.slope * np.maximum(0, np.arange(n) - fitted.knee)) ** 2).sum())
    assert error == pytest.approx(best[0], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("knee", [2, 10, 40, 56])
def test_finds_a_clean_knee_exactly(knee):
    """Flat, then rising, without noise: the knee itself."""
    fitted = fit_hinge([0.3 + 0.2 * max(0, i - knee) for i in range(60)])
    assert fitted.knee == knee
    assert fitted.level == pytest.approx(0.3)
    assert fitted.slope == pytest.approx(0.2)


@pytest.mark.parametrize("values", [[], [1.0] * 4, [1.0] * 20, list(range(20, 0, -1))])
def test_without_a_rise_there_is_no_hinge(values):
    """Too short, constant or falling: None."""
    assert fit_hinge(values) is None
