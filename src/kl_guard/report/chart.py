"""Charts as numbers for the page: lines in a square of 0 to 1000, labels in percent of it.

The lines are drawn by SVG that is stretched to the page, the words beside them are plain text, so that a chart can be
read at any width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kl_guard.report.thinning import Point

SIZE = 1000
DECADES_SHOWN = 6
DECADE = 10.0
LARGEST = 1e300  # so is 1 / LARGEST the smallest: next to the ends of floating point there are no round decades


@dataclass(frozen=True)
class Line:
    """One line: the value of its class in the style sheet, its name, and SVG path data."""

    kind: str
    name: str
    path: str


@dataclass(frozen=True)
class Mark:
    """Something at a step or a value: percent from the left (or the top), its kind and its words."""

    at: float
    kind: str
    text: str


@dataclass
class Chart:
    """What the page needs to draw one chart."""

    title: str
    summary: str
    lines: list[Line] = field(default_factory=list)
    ticks: list[Mark] = field(default_factory=list)
    levels: list[Mark] = field(default_factory=list)
    events: list[Mark] = field(default_factory=list)


class Scale:
    """From values to a place between 0 (low) and 1 (high); logarithmic where they span decades."""

    def __init__(self, values: Sequence[float], *, logarithmic: bool) -> None:
        positive = [value for value in values if value > 0]
        self.logarithmic = logarithmic and bool(positive)
        if self.logarithmic:
            high = min(max(positive), LARGEST)
            low = min(max(min(positive), high / DECADE**DECADES_SHOWN, 1 / LARGEST), LARGEST)
            self.low = DECADE ** math.floor(math.log10(low))
            self.high = max(DECADE ** math.ceil(math.log10(high)), DECADE * self.low)
        else:
            self.low, self.high = min(values, default=0.0), max(values, default=1.0)
            if self.low == self.high:
                pad = abs(self.low) / 2 or 0.5
                self.low, self.high = self.low - pad, self.high + pad

    def place(self, value: float) -> float:
        """Return where a value is, within the chart."""
        if self.logarithmic:
            value = max(value, self.low)
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Return values to write at the axis."""
        if self.logarithmic:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            every = max(1, (last - first) // 4)
            return [DECADE**power for power in range(first, last + 1, every)]
        return [self.low, (self.low + self.high) / 2, self.high]


class Steps:
    """From steps to a place between 0 and 1."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, max(last, first + 1)

    def place(self, step: float) -> float:
        """Return where a step is, within the chart."""
        return min(1.0, max(0.0, (step - self.first) / (self.last - self.first)))

    def percent(self, step: float) -> float:
        """Return the same in percent, rounded."""
        return round(100 * self.place(step), 2)


def path(points: Sequence[Point], steps: Steps, scale: Scale) -> str:
    """Return SVG path data; a gap lifts the pen, a point of its own becomes a dot."""
    parts: list[str] = []
    pen_down = False
    for index, (step, value) in enumerate(points):
        if value is None:
            pen_down = False
            continue
        x, y = round(SIZE * steps.place(step), 1), round(SIZE * (1 - scale.place(value)), 1)
        parts.append(f"{'L' if pen_down else 'M'}{x:g} {y:g}")
        alone = not pen_down and (index + 1 == len(points) or points[index + 1][1] is None)
        if alone:
            parts.append("h0")
        pen_down = True
    return "".join(parts)


def number(value: float | None) -> str:
    """Return a number in few digits."""
    if value is None:
        return "-"
    if math.isfinite(value) and value == int(value) and abs(value) < 10**6:
        return str(int(value))
    return f"{value:.3g}"
