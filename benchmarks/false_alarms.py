"""How often healthy runs are halted, and how soon blow-ups are: the whole guard over thousands of simulated runs.

    python benchmarks/false_alarms.py [--runs 2000] [--blow-ups 500] [--long 100] [--seed 0]

`--runs` healthy runs of 200 to 5,000 observations and `--long` of 20,000, evenly over five families; `--blow-ups`, and
`--long` that blow up late in 20,000. Beside them a quarter as many runs each with noise rougher than that of any
recorded series. Every observation goes to a `KLGuard` with its defaults. A critical finding would have ended the run:
the run stops there. A delay is counted in observations from a crossing of the threshold, or from the cause, to the
critical finding (see `simulated_runs.Run`). Intervals are Wilson's, at 95 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest
from simulated_runs import (
    BLOW_UPS,
    HEALTHY,
    LATE,
    LENGTHS,
    RECORDED,
    ROUGHER,
    Noise,
    Run,
    between,
    blow_up,
    healthy,
)

from kl_guard import GuardConfig, KLGuard, Observation

LONG = 20_000
LATE_LENGTH = 5_000
BATCH = 8  # runs that a process takes at a time


class Task(NamedTuple):
    """One run to simulate: the group of the table it belongs to, its family, its lengths, its noise and its seed."""

    group: str
    family: str
    lengths: tuple[int, int]
    noise: Noise
    seed: tuple[int, ...]

    def simulate(self) -> Run:
        """Return the run; the same task gives the same run."""
        rng = np.random.default_rng(self.seed)
        low, high = self.lengths
        length = low if low == high else round(between(rng, low, high))
        make = healthy if self.family in HEALTHY else blow_up
        return make(self.family, rng, length, self.noise)


class Outcome(NamedTuple):
    """What the guard said about a run, in observations: where it ended, and how much it had said before."""

    task: Task
    run: Run
    length: int
    fired: int | None
    warned: bool
    findings: int


def watch(task: Task, config: GuardConfig | None = None) -> Outcome:
    """Simulate one run and feed it to a guard until it asks for a halt."""
    run = task.simulate()
    guard = KLGuard(config, rank=0, announce=False, expected_observations=len(run.values))
    fired, step = None, 0
    for step, kl in enumerate(run.values, start=1):
        if guard.take(Observation(step, kl_mean=kl)):
            fired = step
            break
    warned = any(finding.signature == "KL_GROWTH" for finding in guard.findings)
    return Outcome(task, run._replace(values=[]), step, fired, warned, len(guard.findings))


def tasks(runs: int, blow_ups: int, long: int, seed: int) -> list[Task]:
    """Return all runs of the study."""
    late = (LATE_LENGTH, LATE_LENGTH)
    out: list[Task] = []

    def add(group: str, count: int, families: Iterable[str], lengths: tuple[int, int], noise: Noise = RECORDED) -> None:
        names = list(families)
        number = len({task.group for task in out})
        out.extend(
            Task(group, names[i % len(names)], lengths, noise, (seed, number, i // len(names), i % len(names)))
            for i in range(count)
        )

    add("healthy", runs, HEALTHY, LENGTHS)
    add(f"healthy, {LONG:,} observations", long, HEALTHY, (LONG, LONG))
    add("healthy, rougher noise", runs // 4, HEALTHY, LENGTHS, ROUGHER)
    add("blow-up", blow_ups - blow_ups // 4, (f for f in BLOW_UPS if f != LATE), LENGTHS)
    add(f"blow-up in {LATE_LENGTH:,}", blow_ups // 4, [LATE], late)
    add(f"blow-up in {LONG:,}", long, [LATE], (LONG, LONG))
    add("blow-up, rougher noise", blow_ups // 4, (f for f in BLOW_UPS if f != LATE), LENGTHS, ROUGHER)
    return out


def study(
    todo: Sequence[Task], processes: int | None = None, progress: Callable[[int], None] | None = None
) -> list[Outcome]:
    """Watch all runs, in several processes; the order of the answers is that of the tasks."""
    out: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(processes or os.cpu_count()) as pool:
        for outcome in pool.imap(watch, todo, chunksize=BATCH):
            out.append(outcome)
            if progress is not None:
                progress(len(out))
    return out


# The tables.

HEALTHY_HEADER = [
    "healthy runs",
    "family",
    "runs",
    "observations",
    "halted",
    "rate (95 % interval)",
    "with a KL_GROWTH",
    "findings per 1,000",
]
BLOW_UP_HEADER = [
    "blow-ups",
    "family",
    "caught",
    "halted before the cause",
    "behind the crossing: median, 90 %",
    "behind the observed crossing",
    "behind the cause",
]
ALL = "all"


def rows(outcomes: Sequence[Outcome]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of both tables, those of healthy runs and those of blow-ups."""
    good: list[list[str]] = []
    bad: list[list[str]] = []
    for group, family, members in _groups(outcomes):
        if members[0].task.family in HEALTHY:
            good.append([group, family, *_healthy_row(members)])
        else:
            bad.append([group, family, *_blow_up_row(members)])
    if late := [outcome for outcome in outcomes if outcome.task.family == LATE]:
        bad.append([f"blow-up in {LATE_LENGTH:,} and more", ALL, *_blow_up_row(late)])
    return good, bad


def _groups(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, list[Outcome]]]:
    for group in dict.fromkeys(outcome.task.group for outcome in outcomes):
        members = [outcome for outcome in outcomes if outcome.task.group == group]
        families = list(dict.fromkeys(outcome.task.family for outcome in members))
        if len(families) > 1:
            for family in families:
                yield group, family, [outcome for outcome in members if outcome.task.family == family]
        yield group, ALL, members


def _healthy_row(members: Sequence[Outcome]) -> list[str]:
    halted = sum(outcome.fired is not None for outcome in members)
    steps = sum(outcome.length for outcome in members)
    return [
        f"{len(members):,}",
        f"{steps:,}",
        str(halted),
        rate(halted, len(members)),
        rate(sum(outcome.warned for outcome in members), len(members)),
        f"{1000 * sum(outcome.findings for outcome in members) / steps:.3f}",
    ]


def _blow_up_row(members: Sequence[Outcome]) -> list[str]:
    delays: dict[str, list[int]] = {"crossing": [], "seen": [], "cause": []}
    caught = early = 0
    for outcome in members:
        run, fired = outcome.run, outcome.fired
        if fired is None:
            continue
        if run.cause is not None and fired <= run.cause:
            early += 1
            continue
        caught += 1
        for name, values in delays.items():
            since = getattr(run, name)
            if since is not None:
                values.append(fired - since)
    return [f"{caught} of {len(members)}", str(early), *map(_spread, delays.values())]


def _spread(values: Sequence[int]) -> str:
    return f"{statistics.median(values):g}, {np.quantile(values, 0.9):.0f}" if values else "-"


def rate(count: int, of: int) -> str:
    """Return a share with its 95 % interval, in per cent."""
    interval = binomtest(count, of).proportion_ci(method="wilson")
    return f"{100 * count / of:.2f} % ({100 * interval.low:.2f} to {100 * interval.high:.2f})"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    out = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*out, *("| " + " | ".join(line) + " |" for line in lines)])


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2_000, help="healthy runs of 200 to 5,000 observations")
    parser.add_argument("--blow-ups", type=int, default=500, help="runs that blow up, a quarter of them late in 5,000")
    parser.add_argument("--long", type=int, default=100, help="healthy runs of 20,000 observations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="also list each healthy run that was halted")
    options = parser.parse_args()
    todo = tasks(options.runs, options.blow_ups, options.long, options.seed)
    began = time.perf_counter()

    def show(done: int) -> None:
        if sys.stderr.isatty() and (done % BATCH == 0 or done == len(todo)):
            print(f"\r{done:,} of {len(todo):,} runs", end="\n" if done == len(todo) else "", file=sys.stderr)

    outcomes = study(todo, progress=show)
    good, bad = rows(outcomes)
    print(f"seed {options.seed}, {len(todo):,} runs in {time.perf_counter() - began:.0f} s\n")
    print(markdown(HEALTHY_HEADER, good), markdown(BLOW_UP_HEADER, bad), sep="\n\n")
    for outcome in outcomes:
        missed = outcome.fired is None
        if options.list and missed != (outcome.task.family in HEALTHY):
            print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
