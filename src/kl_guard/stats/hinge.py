"""Where a series that was flat began to rise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHORTEST = 5
EDGE = 2  # knees closer to an end than this leave no line to fit


class Hinge(NamedTuple):
    """A line of slope `base` up to `knee`, where its height is `level`, then one of slope `slope`, per step."""

    knee: int
    level: float
    base: float
    slope: float


def fit_hinge(values: Sequence[float], *, flat: bool = True) -> Hinge | None:
    """Fit a line that bends upward once, by least squares over every possible knee.

    For a knee k the model is ``a + b * i + c * max(0, i - k)`` with c > 0 and b + c > 0; with `flat`, b is 0. All knees
    are solved at once from suffix sums: O(n).

    Parameters
    ----------
    values:
        Finite numbers, shape ``(n,)``.
    flat:
        Whether the part before the knee is flat. Where it rises or falls slowly by itself, a flat part pulls the knee
        to earlier numbers.

    Returns
    -------
    Hinge or None
        The best fit; None when nothing bends upward and rises, or for fewer than 5 numbers.

    References
    ----------
    Hinkley, "Inference in two-phase regression", JASA 66 (1971).

    Examples
    --------
    >>> fit_hinge([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]).knee
    3
    >>> fit_hinge([1.0, 1.1, 1.2, 1.3, 2.3, 3.3, 4.3], flat=False).knee
    3
    """
    y = np.asarray(values, dtype=float)
    n = len(y)
    if n < SHORTEST:
        return None
    y = y - (mean := float(y.mean()))
    times = np.arange(n) - (n - 1) / 2
    knees = np.arange(EDGE, n - EDGE)
    ramp = n - 1.0 - knees  # the hinge term of a knee is 1, 2, ..., ramp
    total = ramp * (ramp + 1) / 2
    squares = ramp * (ramp + 1) * (2 * ramp + 1) / 6
    moment = np.cumsum(np.cumsum(y[::-1]))[::-1][knees + 1]  # sum of hinge term times y
    spread = squares - total**2 / n
    slope_of_y, tilt = 0.0, np.zeros(len(knees))
    if not flat:  # take the line out of y and of the hinge term
        variance = float(times @ times)
        slope_of_y = float(times @ y) / variance
        tilt = (squares + (knees - (n - 1) / 2) * total) / variance
        moment = moment - slope_of_y * tilt * variance
        spread = spread - tilt**2 * variance
    bend = np.divide(moment, spread, out=np.zeros(len(knees)), where=spread > 1e-9)
    base = slope_of_y - bend * tilt
    explained = np.where((bend > 0) & (base + bend > 0), bend * moment, -np.inf)
    best = int(np.argmax(explained))
    if not explained[best] > 0:
        return None
    knee = int(knees[best])
    level = mean - float(bend[best] * total[best]) / n + float(base[best]) * float(times[knee])
    return Hinge(knee, level, float(base[best]), float(base[best] + bend[best]))
