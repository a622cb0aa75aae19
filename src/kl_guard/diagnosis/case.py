"""A finding with the run around it: what rules about causes look at."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_guard.findings import Cause, Finding
from kl_guard.history import History
from kl_guard.outliers import OutlierLedger

SETTINGS = frozenset({"learning_rate", "beta"})  # what a rollback changes
TINY_BETA = 1e-3
NEAR = 20  # observations before the departure in which a changed setting counts as its cause
JUMP = 1.5
OUTSTANDING = 3.0  # a jump is that many times the usual change around it
FEW = 8  # observations that make a level
CLEARLY = 0.1  # nats per token at step 1, as REFERENCE_MISMATCH has it
EQUAL = 0.01  # nats per token at step 1 up to which both were scored alike

Scored = tuple[float, Cause]
"""A cause, and how much speaks for it: from 0 to 1."""


@dataclass(frozen=True)
class Case:
    """A finding with the run around it.

    Settings of steps up to `since` are those of an attempt that was given up; `facts` are what the adapter noted of the
    set-up, `outliers` the tokens that carried the KL.
    """

    finding: Finding
    history: History
    token_mean: bool
    since: int = -1
    facts: Mapping[str, Any] = field(default_factory=dict)
    outliers: OutlierLedger = field(default_factory=OutlierLedger)

    @property
    def departure(self) -> int:
        """Index of the observation at which KL left its regime."""
        step = self.finding.step if self.finding.departure_step is None else self.finding.departure_step
        return self.history.index(step)

    @property
    def onset(self) -> int:
        """Index of the onset."""
        step = self.finding.step if self.finding.onset_step is None else self.finding.onset_step
        return self.history.index(step)

    def at(self, name: str, index: int) -> float | None:
        """Return the last finite value of a metric at or before an index."""
        column = self.history.column(name)
        first = self.history.index(self.since + 1) if name in SETTINGS else 0
        last = min(max(index, first), len(column) - 1)
        return next((column[i] for i in range(last, first - 1, -1) if math.isfinite(column[i])), None)

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return step and value of a metric wherever it is finite."""
        pairs = zip(self.history.steps, self.history.column(name), strict=True)
        since = self.since if name in SETTINGS else -1
        return [(step, value) for step, value in pairs if math.isfinite(value) and step > since]

    def medians(self, name: str) -> tuple[float, float] | None:
        """Return a metric's median before the departure and now, where both rest on a few values."""
        column = self.history.column(name)
        before = finite(column[max(0, self.departure - 4 * FEW) : self.departure])
        now = finite(column[-FEW:])
        return (statistics.median(before), statistics.median(now)) if len(before) >= 3 and len(now) >= 3 else None

    def jump(self, name: str) -> tuple[float, float, int] | None:
        """Return the largest sudden change of a setting near the departure: before, after, first step with it.

        A change is sudden when it is by half at least and stands out from the changes around it, as those of a schedule
        do not.
        """
        values = self.known(name)
        first = self.history.steps[max(0, min(self.departure - NEAR, len(self.history) - 1))]
        last = self.history.steps[min(self.onset, len(self.history) - 1)]
        sizes = [log_ratio(a[1], b[1]) for a, b in itertools.pairwise(values)]
        best: int | None = None
        for i, size in enumerate(sizes):
            if not first <= values[i + 1][0] <= last or abs(size) < math.log(JUMP):
                continue
            around = [abs(s) for k, s in enumerate(sizes[max(0, i - 4) : i + 5], max(0, i - 4)) if k != i]
            if around and abs(size) < OUTSTANDING * statistics.median(around):
                continue
            if best is None or abs(size) > abs(sizes[best]):
                best = i
        return None if best is None else (values[best][1], values[best + 1][1], values[best + 1][0])

    def now(self, name: str) -> float | None:
        """Return the median of a metric's last few finite values at or before the finding, among the last eight."""
        values = self.history.column(name)[max(0, len(self.history) - FEW) :]
        known = finite(values)[-3:]
        return statistics.median(known) if known else None

    def same(self, name: str) -> float | None:
        """Return the value that two of the last three steps share, of a metric that is a name and no quantity."""
        last = finite(self.history.column(name)[max(0, len(self.history) - FEW) :])[-3:]
        return next((value for value in reversed(last) if last.count(value) > 1), None)

    @property
    def first_kl(self) -> float | None:
        """KL at step 1 of a fresh run, where policy and reference should be equal; None where it is not known."""
        first = next(iter(self.known("kl_mean")), None)
        return first[1] if first is not None and first[0] <= 1 and self.token_mean else None

    @property
    def wrong_from_the_start(self) -> bool:
        """Whether KL was high before there was anything to learn from."""
        return self.first_kl is not None and self.first_kl > CLEARLY

    @property
    def began_equal(self) -> bool:
        """Whether policy and reference were scored alike at first: what differs since, the policy has learnt."""
        return self.first_kl is not None and self.first_kl < EQUAL

    @property
    def began_unequal(self) -> bool:
        """Whether policy and reference were not scored alike at first: what is wrong with the set-up shows there."""
        return self.first_kl is not None and self.first_kl >= EQUAL


def finite(values: Sequence[float]) -> list[float]:
    """Return the finite ones."""
    return [v for v in values if math.isfinite(v)]


def log_ratio(before: float, after: float) -> float:
    """Return the logarithm of the ratio of two numbers, of which either may be 0."""
    least = 1e-30
    return math.log(max(after, least)) - math.log(max(before, least))


def times(factor: float) -> str:
    """Say by how much something has grown."""
    return f"x{factor:.0f}" if factor >= 10 else f"x{factor:.2g}"


def distance(steps: int) -> str:
    """Say where a step lies that is `steps` before the departure."""
    count = f"{abs(steps)} step{'s' if abs(steps) != 1 else ''}"
    return (
        "at the estimated departure"
        if steps == 0
        else f"{count} {'before' if steps > 0 else 'after'} the estimated departure"
    )
