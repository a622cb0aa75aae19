"""What an observation costs as a run grows: kl-guard beside a naive re-computation and rlprobe, on the same streams.

    python benchmarks/cost.py [--observations 100000]

Times are medians over the last 1,000 observations before each length, journal included, in microseconds. Streams:
a healthy run; one that stays above the floor, so that every horizon is judged at every step; and the same with every
statistic of every horizon read at every step, so that no shortcut can hide work. rlprobe re-reads its whole recording
at each 25th step; its figure is the mean over the last 1,000 steps, from memory, without its files.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import peers
from detection import install_peers

from kl_guard import GuardConfig, KLGuard

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import oracle

LENGTHS = (1_000, 10_000, 100_000)
LAST = 1_000
LIMIT_MICROSECONDS, LIMIT_RATIO, LIMIT_MEGABYTES = 400, 3.0, 64
RLPROBE_LONGEST = 10_000  # its cost grows with the square of the length


def stream(level: float) -> Iterator[float]:
    """Yield KL around `level`, as noisy as real logs (standard deviation of log KL 0.4, lag-1 correlation 0.5)."""
    rng, x = random.Random(0), 0.0
    while True:
        x = 0.5 * x + rng.gauss(0, 0.4 * math.sqrt(0.75))
        yield level * math.exp(x)


def measure_guard(level: float, length: int, *, read_all: bool) -> dict[int, float]:
    """Return the median cost of an observation at each length, in microseconds."""
    out: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="kl-guard-") as folder:
        guard = KLGuard(GuardConfig(action="warn"), output_dir=folder, announce=False)
        costs: list[int] = []
        for step, kl in enumerate(itertools.islice(stream(level), length), start=1):
            began = time.perf_counter_ns()
            guard.observe(
                step=step,
                kl_mean=kl,
                kl_max=9 * kl,
                reward=1.0,
                entropy=0.7,
                loss=0.1,
                grad_norm=0.5,
                learning_rate=1e-6,
            )
            if read_all and step > 32:
                for window in guard.windows():
                    _ = window.early_median, window.late_mean, window.late_median, window.trend()
            costs.append(time.perf_counter_ns() - began)
            if step in LENGTHS:
                out[step] = statistics.median(costs[-LAST:]) / 1e3
        guard.close()
    return out


def measure_naive(level: float, length: int) -> dict[int, float]:
    """Return the cost of judging both levels from scratch at each length, in microseconds."""
    values = list(itertools.islice(stream(level), length))
    rules = oracle.Rule(), oracle.Rule(abs_floor=0.1, warmup=0, record_factor=2.0)
    out: dict[int, float] = {}
    for n in (n for n in LENGTHS if n <= length):
        costs = []
        for _ in range(5):
            began = time.perf_counter_ns()
            oracle.judge(values[:n], rules[0])
            oracle.judge(values[20:n], rules[1])
            costs.append(time.perf_counter_ns() - began)
        out[n] = statistics.median(costs) / 1e3
    return out


def measure_rlprobe(level: float, length: int) -> dict[int, float]:
    """Return rlprobe's mean cost per step before each length, in microseconds."""
    out: dict[int, float] = {}
    with peers.rlprobe_live(disk=False) as probe:
        costs: list[int] = []
        for step, kl in enumerate(itertools.islice(stream(level), min(length, RLPROBE_LONGEST)), start=1):
            began = time.perf_counter_ns()
            probe.observe(step, kl, kl_max=9 * kl, reward=1.0, entropy=0.7, loss=0.1, grad_norm=0.5, learning_rate=1e-6)
            costs.append(time.perf_counter_ns() - began)
            if step in LENGTHS:
                out[step] = statistics.fmean(costs[-LAST:]) / 1e3
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
    subjects: dict[str, Callable[[], dict[int, float]]] = {
        "kl-guard, healthy (KL 0.05)": lambda: measure_guard(0.05, n, read_all=False),
        "kl-guard, above the floor (KL 1)": lambda: measure_guard(1.0, n, read_all=False),
        "kl-guard, every statistic read": lambda: measure_guard(1.0, n, read_all=True),
        "naive re-computation (KL 1)": lambda: measure_naive(1.0, n),
    }
    if not any(missing.name == "rlprobe" for missing in peers.missing_peers()):
        subjects["rlprobe (KL 1)"] = lambda: measure_rlprobe(1.0, n)
    print("Microseconds per observation, at a run's length in observations:\n")
    print("| | " + " | ".join(f"{length:,}" for length in lengths) + " | growth |\n|" + "---|" * (len(lengths) + 2))
    kept = True
    for name, measure in subjects.items():
        costs = measure()
        cells = [f"{costs[length]:,.0f}" if length in costs else "-" for length in lengths]
        growth = costs[max(costs)] / costs[min(costs)]
        print(f"| {name} | " + " | ".join(cells) + f" | x{growth:.1f} |", flush=True)
        if name.startswith("kl-guard"):
            kept &= costs[max(costs)] <= LIMIT_MICROSECONDS and growth <= LIMIT_RATIO
    total, added = memory(n)
    kept &= added <= LIMIT_MEGABYTES
    print(f"\nMemory after {n:,} observations above the floor: {added:.0f} MB added, {total:.0f} MB in all.")
    limits = f"{LIMIT_MICROSECONDS} us, growth x{LIMIT_RATIO:g}, {LIMIT_MEGABYTES} MB"
    print(f"Limits for kl-guard ({limits}): {'kept' if kept else 'NOT kept'}.")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
