"""What an observation costs as a run grows: kl-guard beside a naive re-computation and rlprobe, on the same streams.

    python benchmarks/cost.py [--observations 100000]

Every subject is brought to each length; then all take an observation in turn, a thousand times, so that a machine that
slows down does so for all of them. Times are medians, journal included, in microseconds. Streams: a healthy run; one
that stays above the floor, so that every horizon is judged at every step; and the same with every statistic of every
horizon read at every step, so that no shortcut can hide work. The naive re-computation has a turn in 50. rlprobe
re-reads its whole recording at each 25th step; its figure is the mean, from memory, without its files.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import peers
from detection import install_peers

from kl_guard import GuardConfig, KLGuard

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import oracle

LENGTHS = (1_000, 10_000, 100_000)
TURNS = 1_000
NAIVE = "naive re-computation (KL 1)"
LIMIT_RATIO, LIMIT_SHARE, LIMIT_MEGABYTES = 3.0, 0.1, 64  # growth; of the naive cost at the greatest length; memory
RLPROBE_LONGEST = 10_000  # its cost grows with the square of the length


def stream(level: float) -> Iterator[float]:
    """Yield KL around `level`, as noisy as real logs (standard deviation of log KL 0.4, lag-1 correlation 0.5)."""
    rng, x = random.Random(0), 0.0
    while True:
        x = 0.5 * x + rng.gauss(0, 0.4 * math.sqrt(0.75))
        yield level * math.exp(x)


class Subject(Protocol):
    """Something that takes one observation at a time, at about one length of the run."""

    name: str
    length: int
    every: int
    """In which turns: each one, or each so many."""

    def take(self) -> None:
        """Take the next observation."""

    def figure(self, costs: list[int]) -> float:
        """Return what an observation costs, of the nanoseconds that each took."""


class Guarded:
    """A guard that has seen nearly `length` observations, with its journal in a folder."""

    every = 1

    def __init__(self, name: str, level: float, length: int, folder: Path, *, read_all: bool = False) -> None:
        self.name, self.length, self._read_all = name, length, read_all
        self._guard = KLGuard(GuardConfig(action="warn"), output_dir=folder, announce=False)
        self._rows = enumerate(stream(level), start=1)
        for _ in range(length - TURNS):
            self._observe()

    def _observe(self) -> None:
        step, kl = next(self._rows)
        self._guard.observe(
            step=step,
            kl_mean=kl,
            kl_max=9 * kl,
            reward=1.0,
            entropy=0.7,
            loss=0.1,
            grad_norm=0.5,
            learning_rate=1e-6,
        )

    def take(self) -> None:
        """Observe, and read what is to be read."""
        self._observe()
        if self._read_all and len(self._guard.history) > 32:
            for window in self._guard.windows():
                _ = window.early_median, window.late_mean, window.late_median, window.trend()

    def figure(self, costs: list[int]) -> float:
        """Return the median."""
        return statistics.median(costs)


class Naive:
    """Both levels judged from scratch."""

    every = 50

    def __init__(self, name: str, level: float, length: int) -> None:
        self.name, self.length = name, length
        self._values = list(itertools.islice(stream(level), length))
        self._rules = oracle.Rule(), oracle.Rule(abs_floor=0.1, warmup=0, record_factor=2.0)

    def take(self) -> None:
        """Judge all that there is."""
        oracle.judge(self._values, self._rules[0])
        oracle.judge(self._values[20:], self._rules[1])

    def figure(self, costs: list[int]) -> float:
        """Return the median."""
        return statistics.median(costs)


class RLProbe:
    """The peer with the nearest rule, which has seen nearly `length` observations."""

    every = 1

    def __init__(self, name: str, level: float, length: int, stack: ExitStack) -> None:
        self.name, self.length = name, length
        self._probe = stack.enter_context(peers.rlprobe_live(disk=False))
        self._rows = enumerate(stream(level), start=1)
        for _ in range(length - TURNS):
            self.take()

    def take(self) -> None:
        """Observe."""
        step, kl = next(self._rows)
        self._probe.observe(
            step, kl, kl_max=9 * kl, reward=1.0, entropy=0.7, loss=0.1, grad_norm=0.5, learning_rate=1e-6
        )

    def figure(self, costs: list[int]) -> float:
        """Return the mean: it does its work at each 25th step."""
        return statistics.fmean(costs)


def subjects(lengths: list[int], stack: ExitStack) -> Iterator[Subject]:
    """Yield all that take turns."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kl-guard-")))
    for length in lengths:
        where = folder / str(length)
        yield Guarded("kl-guard, healthy (KL 0.05)", 0.05, length, where / "healthy")
        yield Guarded("kl-guard, above the floor (KL 1)", 1.0, length, where / "above")
        yield Guarded("kl-guard, every statistic read", 1.0, length, where / "read", read_all=True)
        yield Naive(NAIVE, 1.0, length)
        if length <= RLPROBE_LONGEST and not any(missing.name == "rlprobe" for missing in peers.missing_peers()):
            yield RLProbe("rlprobe (KL 1)", 1.0, length, stack)


def measure(lengths: list[int]) -> dict[str, dict[int, float]]:
    """Return microseconds per observation, by subject and length."""
    with ExitStack() as stack:
        taking = [(subject, list[int]()) for subject in subjects(lengths, stack)]
        for turn, (subject, costs) in itertools.product(range(TURNS), taking):
            if turn % subject.every == 0:
                began = time.perf_counter_ns()
                subject.take()
                costs.append(time.perf_counter_ns() - began)
        out: dict[str, dict[int, float]] = {}
        for subject, costs in taking:
            out.setdefault(subject.name, {})[subject.length] = subject.figure(costs) / 1e3
    return out


def memory(length: int) -> tuple[float, float]:
    """Return the resident megabytes of a process after `length` observations, and what they added."""
    command = [sys.executable, __file__, "--memory", str(length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    total, added = done.stdout.split()
    return float(total), float(added)


def print_memory(length: int) -> None:
    """Feed a guard in this process and print what it holds (see `memory`)."""
    before = resident()
    guard = KLGuard(GuardConfig(action="warn"), announce=False)
    for step, kl in enumerate(itertools.islice(stream(1.0), length), start=1):
        guard.observe(step=step, kl_mean=kl, kl_max=9 * kl, reward=1.0, loss=0.1, grad_norm=0.5, learning_rate=1e-6)
    after = resident()
    print(after, after - before)


def resident() -> float:
    """Return the resident megabytes of this process, as the kernel counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> int:
    """Print the table; return 1 when a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observations", type=int, default=LENGTHS[-1], help="how long the streams are")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.memory:
        print_memory(options.memory)
        return 0
    install_peers()
    n = options.observations
    lengths = [length for length in LENGTHS if length <= n]
    print("Microseconds per observation, at a run's length in observations:\n")
    print("| | " + " | ".join(f"{length:,}" for length in lengths) + " | growth |\n|" + "---|" * (len(lengths) + 2))
    kept = True
    measured = measure(lengths)
    naive = measured[NAIVE]
    for name, costs in measured.items():
        cells = [f"{costs[length]:,.0f}" if length in costs else "-" for length in lengths]
        growth = costs[max(costs)] / costs[min(costs)]
        print(f"| {name} | " + " | ".join(cells) + f" | x{growth:.1f} |", flush=True)
        if name.startswith("kl-guard"):
            kept &= growth <= LIMIT_RATIO
            kept &= n < LENGTHS[-1] or costs[LENGTHS[-1]] <= LIMIT_SHARE * naive[LENGTHS[-1]]
    total, added = memory(n)
    kept &= added <= LIMIT_MEGABYTES
    print(f"\nMemory after {n:,} observations above the floor: {added:.0f} MB added, {total:.0f} MB in all.")
    limits = f"growth x{LIMIT_RATIO:g}, {LIMIT_SHARE:.0%} of the naive cost at the end, {LIMIT_MEGABYTES} MB"
    print(f"Limits for kl-guard ({limits}): {'kept' if kept else 'NOT kept'}.")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
