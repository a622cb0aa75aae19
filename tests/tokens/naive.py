"""What the tokens of a batch say, computed the plain way in float64."""

from __future__ import annotations

import math

import numpy as np


def k3(x):
    """exp(x) - 1 - x, summed as a series near 0."""
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        series = sum(x**n / math.factorial(n) for n in range(2, 20))
        kl = np.where(np.abs(x) < 0.5, series, np.expm1(x) - x)
    return np.where(x == np.inf, np.inf, kl)


def stats(policy, reference, mask, ids=None):
    """Everything about one batch of [rows, tokens]."""
    policy, reference = np.asarray(policy, np.float64), np.asarray(reference, np.float64)
    mask = np.asarray(mask, bool)
    with np.errstate(invalid="ignore"):
        x = np.where(mask, reference - policy, 0.0)
    kl = k3(x)
    inside = kl[mask]
    n = inside.size
    order = np.sort(inside)[::-1]
    few, percent = max(1, math.ceil(n / 1000)), max(1, math.ceil(n / 100))
    mass = inside.sum()
    last = [row[counts][-1] for row, counts in zip(kl, mask, strict=True) if counts.any()]
    columns = np.arange(mask.shape[1])
    places = {}
    for first in [2**i - 1 for i in range(24)]:
        bucket = (columns >= first) & (columns < 2 * first + 1)
        if (mask & bucket).any():
            places[first] = (int((mask & bucket).sum()), float(kl[mask & bucket].sum()))
    return {
        "tokens": n,
        "mean": mass / n if n else math.nan,
        "k1": -x[mask].mean() if n else math.nan,
        "k2": (x[mask] ** 2).mean() / 2 if n else math.nan,
        "max": order[0] if n else math.nan,
        "x_max": max(0.0, x[mask].max()) if n else math.nan,
        "x_min": min(0.0, x[mask].min()) if n else math.nan,
        "order": order,
        "top_share": order[:few].sum() / mass if mass else 0.0,
        "percent_share": order[:percent].sum() / mass if mass else 0.0,
        "trimmed": order[few:].mean() if n > few else math.nan,
        "end_share": sum(last) / mass if mass else 0.0,
        "places": places,
        "nans": int(np.isnan(inside).sum()),
    }
