"""Hypothesis strategies and fixed scenarios of KL series, as real and adversarial runs give them."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

finite = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


@st.composite
def finite_series(draw: st.DrawFn, max_size: int = 160) -> list[float]:
    """Random walks, ties, constants, spikes, ramps and exponential rises, joined in any order."""
    out: list[float] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["walk", "ties", "constant", "spikes", "rise", "any"]))
        n = draw(st.integers(1, max(1, max_size // 4)))
        rng = random.Random(draw(st.integers(0, 2**32)))
        level = draw(st.sampled_from([0.0, 0.01, 0.2, 1.0, 5.0]))
        if kind == "walk":
            x = level
            for _ in range(n):
                x += rng.gauss(0, 0.1)
                out.append(x)
        elif kind == "ties":
            out += [level + rng.choice([0.0, 0.001, 0.002]) for _ in range(n)]
        elif kind == "constant":
            out += [level] * n
        elif kind == "spikes":
            out += [
                level * math.exp(rng.gauss(0, 0.3)) + (rng.random() < 0.1) * 10 ** rng.uniform(0, 9) for _ in range(n)
            ]
        elif kind == "rise":
            out += [(level + 0.01) * math.exp(rng.uniform(0.02, 0.3) * i + rng.gauss(0, 0.2)) for i in range(n)]
        else:
            out += draw(st.lists(finite, min_size=n, max_size=n))
    return out


@st.composite
def holed_series(draw: st.DrawFn) -> list[float | None]:
    """A finite series with NaN, infinities and missing values mixed in."""
    out: list[float | None] = []
    holes = st.sampled_from([None, math.nan, math.inf, -math.inf])
    for value in draw(finite_series()):
        if draw(st.integers(0, 9)) == 0:
            out.append(draw(holes))
        out.append(value)
    return out


def blow_up(
    start: int = 40, length: int = 80, level: float = 0.02, growth: float = 1.6, cap: float = 1e3
) -> list[float]:
    """A calm series that begins to grow by `growth` per step at step `start` (steps from 1)."""
    return [level if i < start else min(level * growth ** (i - start), cap) for i in range(1, length + 1)]
