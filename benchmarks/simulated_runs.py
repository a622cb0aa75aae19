"""Simulated KL series: healthy runs and blow-ups, with noise as recorded series have it.

A run is a curve without noise, in nats per token, times the exponential of a first-order autoregressive noise. In the
recorded series the standard deviation of log KL about its running median is 0.2 to 0.8 and the correlation from one
observation to the next 0 to 0.8 (nine in ten of them). The same seed gives the same run on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Curve = npt.NDArray[np.float64]

FLOOR, RATIO, COLD, SUSTAIN = 0.5, 8.0, 2.0, 3  # of the rule: where its threshold lies is part of what is simulated
LENGTHS = (200, 5_000)


class Noise(NamedTuple):
    """Ranges of the standard deviation of log KL, and of its correlation from one observation to the next."""

    deviation: tuple[float, float]
    correlation: tuple[float, float]


RECORDED = Noise((0.2, 0.8), (0.0, 0.8))
ROUGHER = Noise((1.0, 1.0), (0.95, 0.95))


class Run(NamedTuple):
    """One simulated run: its KL at steps 1, 2, ..., and for a blow-up where it begins.

    `cause` is the last step before the curve changes its course, `crossing` the first at which the curve without noise
    is above the threshold, `seen` the first of three observations in a row above it, at `cause` or later (None where
    there are none). The threshold is max(8 x the level before the cause, 0.5), and 1.0 where there is no level before.
    """

    values: list[float]
    cause: int | None = None
    crossing: int | None = None
    seen: int | None = None


class Course(NamedTuple):
    """The curve of a blow-up, the position after which it leaves its course, and the level before."""

    curve: Curve
    cause: int
    before: float | None


def autoregressive(rng: np.random.Generator, length: int, noise: Noise) -> Curve:
    """Return noise on log KL, shape ``(length,)``; deviation and correlation are drawn once for the run."""
    deviation, correlation = rng.uniform(*noise.deviation), rng.uniform(*noise.correlation)
    shocks = rng.normal(0.0, deviation * math.sqrt(1 - correlation**2), length)
    out = np.empty(length)
    x = rng.normal(0.0, deviation)
    for i, shock in enumerate(shocks):
        x = correlation * x + shock
        out[i] = x
    return out


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """Return a number drawn evenly on the logarithmic scale."""
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


# Healthy curves.


def saturating_rise(rng: np.random.Generator, length: int) -> Curve:
    """A rise from 0 towards 0.01 to 0.4 that takes the whole run, or a part of it."""
    return between(rng, 0.01, 0.4) * -np.expm1(-np.arange(1, length + 1) / (length * between(rng, 0.03, 0.5)))


def linear_drift(rng: np.random.Generator, length: int) -> Curve:
    """A climb from 0 to 0.4, as steep at the end as at the beginning."""
    del rng
    return 0.4 * np.arange(1, length + 1) / length


def settling(rng: np.random.Generator, length: int) -> Curve:
    """A rise from 0 that settles at 0.1 to 0.8 with a time constant of 10 to 100."""
    return rng.uniform(0.1, 0.8) * -np.expm1(-np.arange(1, length + 1) / rng.uniform(10, 100))


def spiky(rng: np.random.Generator, length: int) -> Curve:
    """One of the other three with rare spikes: 0.1 to 1 % of the observations are 10 to 1,000 times as high."""
    shape = (saturating_rise, linear_drift, settling)[rng.integers(3)]
    spikes = rng.random(length) < between(rng, 0.001, 0.01)
    return shape(rng, length) * np.where(spikes, np.exp(rng.uniform(math.log(10), math.log(1000), length)), 1.0)


HEALTHY: Mapping[str, Callable[[np.random.Generator, int], Curve]] = {
    "saturating rise": saturating_rise,
    "linear drift to 0.4": linear_drift,
    "settles at 0.1 to 0.8": settling,
    "rare spikes": spiky,
    "quantised log": lambda rng, length: (saturating_rise, linear_drift, settling)[rng.integers(3)](rng, length),
}
QUANTISED = "quantised log"  # 2 to 4 decimals


def healthy(family: str, rng: np.random.Generator, length: int, noise: Noise = RECORDED) -> Run:
    """Return a healthy run of one of the families."""
    values = HEALTHY[family](rng, length) * np.exp(autoregressive(rng, length, noise))
    if family == QUANTISED:
        values = np.round(values, int(rng.integers(2, 5)))
    return Run(values.tolist())


# Blow-ups.


def doubling(rng: np.random.Generator, cause: int, length: int) -> Course:
    """A settled run that begins to double every 8 to 60 steps."""
    curve, before = _settled(rng, length)
    return Course(_doubled(curve, cause, between(rng, 8, 60), between(rng, 3, 30)), cause, before)


def jump(rng: np.random.Generator, cause: int, length: int) -> Course:
    """A settled run that goes to 2 to 10 nats per token within 1 to 15 steps; every second one climbs on, to twice."""
    curve, before = _settled(rng, length)
    behind = np.arange(1, length + 1) - cause
    share = np.clip(behind / rng.integers(1, 16), 0.0, 1.0)
    level = between(rng, 2, 10)
    onward = 1 + rng.integers(2) * np.clip(behind / 300, 0.0, 1.0)
    return Course(curve ** (1 - share) * (level * onward) ** share, cause, before)


def from_the_start(rng: np.random.Generator, cause: int, length: int) -> Course:
    """A run that doubles every 3 to 60 steps from the first one on."""
    del cause
    curve = np.full(length, between(rng, 0.003, 0.05))
    return Course(_doubled(curve, 0, between(rng, 3, 60), between(rng, 3, 30)), 0, None)


def late(rng: np.random.Generator, cause: int, length: int) -> Course:
    """One of the first two."""
    return (doubling, doubling, jump)[rng.integers(3)](rng, cause, length)


def _settled(rng: np.random.Generator, length: int) -> tuple[Curve, float]:
    level = between(rng, 0.005, 0.1)
    return level * -np.expm1(-np.arange(1, length + 1) / rng.uniform(5, 40)), level


def _doubled(curve: Curve, cause: int, steps: float, cap: float) -> Curve:
    behind = np.clip(np.arange(1, len(curve) + 1) - cause, 0, None)
    return np.asarray(np.minimum(curve * np.exp2(np.minimum(behind / steps, 60)), np.maximum(curve, cap)))


BLOW_UPS: Mapping[str, Callable[[np.random.Generator, int, int], Course]] = {
    "doubling": doubling,
    "jump": jump,
    "from step 1": from_the_start,
    "late": late,
}
LATE = "late"
GOES_ON = 200  # observations that a run has after the crossing, at least


def blow_up(family: str, rng: np.random.Generator, length: int, noise: Noise = RECORDED) -> Run:
    """Return a blow-up of one of the families; one that is not late gets as long as it takes to cross."""
    if family == LATE:
        cause = int(rng.integers(length // 2, length - 700))
    else:
        cause = int(between(rng, 50, 1_000))
        length = cause + 1_000
    course = BLOW_UPS[family](rng, cause, length)
    threshold = COLD * FLOOR if course.before is None else max(RATIO * course.before, FLOOR)
    crossing = 1 + int(np.argmax(course.curve > threshold))
    length = min(length, crossing + GOES_ON)
    values = course.curve[:length] * np.exp(autoregressive(rng, length, noise))
    return Run(values.tolist(), course.cause, crossing, _sustained(values, course.cause, threshold))


def _sustained(values: Curve, cause: int, threshold: float) -> int | None:
    above = values[cause:] > threshold
    row = np.logical_and.reduce([above[i : len(above) - SUSTAIN + 1 + i] for i in range(SUSTAIN)])
    return cause + 1 + int(np.argmax(row)) if row.any() else None
