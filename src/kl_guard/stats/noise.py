"""How much a series of positive numbers scatters from one to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MOST = 128  # numbers of each half that are looked at: the cost stays bounded


def log_noise(values: Sequence[float], least: float, start: int = 0) -> float:
    """Return the standard deviation of the logarithms about a straight line, in the calmer half of a window.

    Each half has a least-squares line of its own (n - 2 degrees of freedom). A step or a bend looks like noise in the
    half that it falls into, but seldom falls into both. At most the last 128 numbers of each half count: O(1).

    Parameters
    ----------
    values:
        Finite numbers, shape ``(n,)``.
    least:
        Above 0; what is below counts as this much.
    start:
        Where the window begins; it reaches to the end of the values.

    Examples
    --------
    >>> log_noise([1, 2, 4, 8, 9, 8, 9, 8], least=1e-6) < 1e-9
    True
    >>> round(log_noise([1, 2, 1, 2, 1, 2, 1, 2], least=1e-6), 3)
    0.438
    """
    end = len(values)
    middle = start + (end - start) // 2
    halves = values[max(start, middle - MOST) : middle], values[max(middle, end - MOST) :]
    return min(_about_a_line(half, least) for half in halves)


def _about_a_line(values: Sequence[float], least: float) -> float:
    n = len(values)
    if n < 3:
        return 0.0
    y = np.log(np.maximum(np.asarray(values, dtype=float), least))
    y -= y.mean()
    times = np.arange(n) - (n - 1) / 2
    y -= times * (times @ y) / (times @ times)
    return math.sqrt(float(y @ y) / (n - 2))
