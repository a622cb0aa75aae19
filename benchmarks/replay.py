"""What it takes to read a long log, and to run the guard over it.

python benchmarks/replay.py --rows 1000000
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kl_guard import replay
from kl_guard.logs import open_log
from kl_guard.series import from_log


def main() -> None:
    """Write a healthy run in two formats; print seconds, and the memory of the whole process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--replay-rows", type=int, default=100_000, help="rows that the guard is run over")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, write in (("JSON lines", _jsonl), ("CSV", _csv)):
            path = Path(folder) / name
            write(path, options.rows)
            plain = _seconds(functools.partial(_json_only, path)) if name == "JSON lines" else None
            beside = f"; json.loads alone {plain:.1f} s" if plain else ""
            seconds = _seconds(functools.partial(_observations, path))
            size = path.stat().st_size / 1e6
            print(f"{name}: {options.rows:,} rows, {size:.0f} MB, as observations in {seconds:.1f} s{beside}")
        short = Path(folder) / "short"
        _jsonl(short, options.replay_rows)
        seconds = _seconds(lambda: replay(short))
        print(f"replay: {options.replay_rows:,} rows with every detector in {seconds:.1f} s")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _observations(path: Path) -> int:
    return sum(1 for _ in from_log(open_log(path)))


def _json_only(path: Path) -> None:
    with path.open() as file:
        for line in file:
            json.loads(line)


def _rows(count: int) -> list[tuple[int, float, float, float]]:
    rng = random.Random(0)
    return [(step, 0.05 * rng.lognormvariate(0, 0.3), rng.random(), 1e-6) for step in range(1, count + 1)]


def _jsonl(path: Path, count: int) -> None:
    with path.open("w") as file:
        for step, kl, reward, rate in _rows(count):
            file.write(json.dumps({"step": step, "kl": kl, "reward": reward, "learning_rate": rate}) + "\n")


def _csv(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.write("step,kl,reward,learning_rate\n")
        for row in _rows(count):
            file.write(",".join(map(str, row)) + "\n")


if __name__ == "__main__":
    main()
