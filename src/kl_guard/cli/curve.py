"""A series as a line of blocks, on a logarithmic scale where it spans more than a decade."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.:-=+*#"
DECADE = 10.0


def sparkline(values: Sequence[float | None], width: int, *, plain: bool = False) -> str:
    """Return at most `width` characters, each the largest value of its share; a space where there is none.

    >>> sparkline([0.01, 0.02, 0.04, 0.08, 0.5, 3.0], 6)
    '▁▁▂▃▆█'
    """
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    tops = [_largest(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [top for top in tops if top is not None and math.isfinite(top)]
    if not finite:
        return " " * columns
    low, high = min(finite), max(finite)
    above = min((top for top in finite if top > 0), default=high)
    logarithmic = low >= 0 and high > DECADE * above  # a run begins at exactly 0
    low = above if logarithmic else low
    marks = PLAIN if plain else BLOCKS

    def scaled(value: float) -> float:
        return math.log(max(value, low)) if logarithmic else value

    span = scaled(high) - scaled(low)
    return "".join(_mark(top, scaled, scaled(low), span, marks) for top in tops)


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None and not math.isnan(value)), default=None)


def _mark(top: float | None, scaled: Callable[[float], float], low: float, span: float, marks: str) -> str:
    if top is None:
        return " "
    if math.isinf(top):
        return marks[-1]
    share = 0.0 if span <= 0 else (scaled(top) - low) / span
    return marks[min(len(marks) - 1, int(share * len(marks)))]
