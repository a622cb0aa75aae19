"""Which lines of `tokens.jsonl` stay when it has become long."""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from kl_guard.shortening import lines_of

RECENT = 2000  # lines at the end that stay
EVENLY = 1000  # at most so many of the older ones, the same number of steps apart
LARGEST = 200  # of the older ones, those with the largest KL of a token
NEAR = 3  # steps around a finding
NEAR_MOST = 1000  # at most so many lines for that, those of the latest findings


def worth_keeping(path: Path, upto: int, *, marked: Collection[int] = ()) -> Iterator[bytes]:
    """Yield the lines to keep of the first `upto` bytes of a file of tokens; nothing where all are recent.

    Of older steps every n-th stays, with n a power of two that grows with the run, the steps with the largest KL of a
    token, and those next to a finding, whose steps are `marked`.
    """
    steps: list[tuple[int, float]] = [_step_and_kl(line) for line in lines_of(path, upto)]
    older = len(steps) - RECENT
    if older <= 0:
        return
    kept = _evenly([step for step, _ in steps[:older]])
    kept.update(heapq.nlargest(LARGEST, range(older), key=lambda i: steps[i][1]))
    at = sorted(marked)
    kept.update([i for i in range(older) if _is_near(at, steps[i][0])][-NEAR_MOST:])
    for i, line in enumerate(lines_of(path, upto)):
        if i >= older or i in kept:
            yield line


def _step_and_kl(line: bytes) -> tuple[int, float]:
    """Return step and largest KL of a line; -1 and no KL for one that cannot be read."""
    try:
        record: dict[str, Any] = json.loads(line)
        step, kl = int(record["step"]), float(record["kl_max"])
    except (KeyError, OverflowError, TypeError, ValueError, RecursionError):
        return -1, -math.inf
    return step, math.inf if math.isnan(kl) else kl


def _evenly(steps: list[int]) -> set[int]:
    """Return the places of the first line in each share of the steps; done again later, the same ones stay."""
    span = max(steps) + 1
    share = 1 << max(0, math.ceil(math.log2(span / EVENLY))) if span > EVENLY else 1
    kept, before = set(), -1
    for i, step in enumerate(steps):
        if step >= 0 and step // share != before:
            before = step // share
            kept.add(i)
    return kept


def _is_near(marked: list[int], step: int) -> bool:
    at = bisect_left(marked, step - NEAR)
    return at < len(marked) and marked[at] <= step + NEAR
