"""Where a series that was flat began to rise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHORTEST = 5
EDGE = 2  # knees closer to an end than this leave no line to fit


class Hinge(NamedTuple):
    """A flat line up to `knee`, then a line that rises by `slope` per step; `level` is the height of the flat part."""

    knee: int
    level: float
    slope: float


def fit_hinge(values: Sequence[float]) -> Hinge | None:
    """Fit a flat line followed by a rising one, by least squares over every possible knee.

    For a knee k the model is ``level + slope * max(0, i - k)``. All knees are solved at once from suffix sums: O(n).

    Parameters
    ----------
    values:
        Finite numbers, shape ``(n,)``.

    Returns
    -------
    Hinge or None
        The best fit with a positive slope; None when there is none, or fewer than 5 numbers.

    References
    ----------
    Hinkley, "Inference in two-phase regression", JASA 66 (1971): the two-line case, here with the first slope zero.

    Examples
    --------
    >>> fit_hinge([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]).knee
    3
    """
    y = np.asarray(values, dtype=float)
    n = len(y)
    if n < SHORTEST:
        return None
    centred = y - y.mean()
    knees = np.arange(EDGE, n - EDGE)
    rising = n - 1.0 - knees  # numbers after the knee
    hinge_sum = rising * (rising + 1) / 2
    hinge_squares = rising * (rising + 1) * (2 * rising + 1) / 6
    tail = np.cumsum(centred[::-1])[::-1]  # [k]: sum from k to the end; summed again: sum of (i - k + 1) y_i
    moment = np.cumsum(tail[::-1])[::-1]
    spread = hinge_squares - hinge_sum**2 / n
    slopes = moment[knees + 1] / spread
    explained = np.where(slopes > 0, slopes**2 * spread, -np.inf)
    best = int(np.argmax(explained))
    if not explained[best] > 0:
        return None
    slope = float(slopes[best])
    return Hinge(int(knees[best]), float(y.mean() - slope * hinge_sum[best] / n), slope)
