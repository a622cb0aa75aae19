"""Long series in few points, without losing a peak."""

from __future__ import annotations

import math
from collections.abc import Sequence

POINTS = 600  # of a drawn line

Point = tuple[int, float | None]


def thinned(steps: Sequence[int], values: Sequence[float | None], most: int = POINTS) -> list[Point]:
    """Return at most `most` points: of each share the smallest and the largest value, in order; None for gaps.

    >>> thinned([1, 2, 3, 4, 5, 6], [1.0, 9.0, 1.0, 1.0, 0.0, 1.0], 4)
    [(1, 1.0), (2, 9.0), (5, 0.0), (6, 1.0)]
    """
    points = [(step, _finite(value)) for step, value in zip(steps, values, strict=True)]
    if len(points) <= most:
        return points
    shares = most // 2
    edges = [round(i * len(points) / shares) for i in range(shares + 1)]
    kept: list[Point] = []
    for i in range(shares):
        share = points[edges[i] : edges[i + 1]]
        known = [(value, step) for step, value in share if value is not None]
        if not known:
            kept.append((share[0][0], None))
            continue
        low, high = min(known), max(known)
        kept += sorted({(low[1], low[0]), (high[1], high[0])})
    return kept


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
