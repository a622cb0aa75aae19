"""The rules written naively: plain batch computation on a whole prefix, no incremental state.

This file is the oracle of the statistics and detectors. It shares no code with the package, uses numpy on
full copies, and is allowed to be slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def mann_kendall(values: Sequence[float]) -> tuple[int, float, float, float]:
    """Return S, its tie-corrected variance, z with continuity correction, and the two-sided p-value."""
    x = np.asarray(values, dtype=float)
    n = len(x)
    s = int(sum(np.sign(x[i + 1 :] - x[i]).sum() for i in range(n - 1)))
    _, counts = np.unique(x, return_counts=True)
    ties = sum(int(c) * (int(c) - 1) * (2 * int(c) + 5) for c in counts)
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    z = 0.0 if s == 0 or variance <= 0 else (s - math.copysign(1, s)) / math.sqrt(variance)
    return s, variance, z, math.erfc(abs(z) / math.sqrt(2))


@dataclass(frozen=True)
class Verdict:
    """What the rule says about one prefix: the horizon (None is the whole run), threshold and onset index."""

    horizon: int | None
    threshold: float
    onset: int


@dataclass(frozen=True)
class Rule:
    """The knobs of one level of the rule (`KL_BLOWUP`, or `KL_GROWTH` with a fifth of the floor)."""

    ratio: float = 8.0
    abs_floor: float = 0.5
    sustain: int = 3
    alpha: float = 0.05
    min_observations: int = 12
    robust: bool = True
    warmup: int = 20
    cold_factor: float = 2.0
    record_factor: float = 4.0
    multi: bool = True
    noise: bool = True


def judge(x: Sequence[float], rule: Rule) -> Verdict | None:
    """Apply the rule to a finite series `x`, every horizon from scratch; the shortest that fires wins."""
    n = len(x)
    horizons = [h for h in (32 * 2**k for k in range(40)) if h < n] if rule.multi else []
    alpha = rule.alpha / (len(horizons) + 1)
    for horizon in [*horizons, None]:
        verdict = judge_window(x, horizon, alpha, rule)
        if verdict is not None:
            return verdict
    return None


def judge_window(x: Sequence[float], horizon: int | None, alpha: float, rule: Rule) -> Verdict | None:
    """Apply the rule to the trailing `horizon` observations of `x`, or to all of it."""
    start = 0 if horizon is None else len(x) - horizon
    w = np.asarray(x[start:], dtype=float)
    n = len(w)
    if n < rule.min_observations:
        return None
    early, late = w[: max(5, n // 4)], w[-max(5, n // 5) :]
    floor = rule.abs_floor
    if rule.robust and start < rule.warmup:
        floor *= rule.cold_factor
    threshold = max(rule.ratio * float(np.median(early)), floor)
    if not math.fsum(late) / len(late) > threshold:
        return None
    if rule.robust and not float(np.median(late)) > threshold:
        return None
    if rule.robust and horizon is not None and start >= 5:
        record = max(float(np.median(x[i : i + 5])) for i in range(start - 4))
        if not float(np.median(late)) > rule.record_factor * record:
            return None
    s, _, _, p = mann_kendall(w[n // 2 :].tolist())
    if not (s > 0 and p < alpha):
        return None
    if rule.robust and rule.noise and start < 5 * rule.warmup:
        sd = min(_scatter(half, rule.abs_floor / 100) for half in (w[: n // 2], w[n // 2 :]))
        sd *= min(1.0, 20 / len(late)) ** 0.5
        cold = start < rule.warmup
        lowered = float(np.median(late)) * math.exp(-(2.5 if cold else 1.0) * sd)
        if not lowered > (rule.abs_floor if cold else rule.ratio * float(np.median(early))):
            return None
    run = 0
    for i, value in enumerate(w):
        run = run + 1 if value > threshold else 0
        if run == rule.sustain:
            return Verdict(horizon, threshold, start + i - rule.sustain + 1)
    first = next(i for i in range(n - len(late), n) if w[i] > threshold)
    return Verdict(horizon, threshold, start + first)


def _scatter(x: np.ndarray, least: float) -> float:
    """Standard deviation of log x about its own straight line, of the last 128 numbers."""
    y = np.log(np.maximum(x[-128:], least))
    if len(y) < 3:
        return 0.0
    t = np.arange(len(y))
    return float(np.sqrt(np.sum((y - np.polyval(np.polyfit(t, y, 1), t)) ** 2) / (len(y) - 2)))
