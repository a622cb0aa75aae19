"""What it costs to replay a recorded run: reading rows, making observations of them, and judging them.

    python benchmarks/replay.py [--rows 1000000] [--formats jsonl csv]

Each measurement is a process of its own, so that peak memory is its own. A row has a step, KL and four more metrics.
`rows` is `read_rows`; `series` also chooses the KL, reads numbers and puts parts of a step together; `replay` judges.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kl_guard import replay
from kl_guard.logs import open_log, read_rows
from kl_guard.series import from_log

STAGES = ("rows", "series", "replay")


def write(path: Path, kind: str, rows: int) -> None:
    """Write a healthy run."""
    rng = random.Random(0)
    names = ("step", "kl", "reward", "loss", "grad_norm", "learning_rate")
    with path.open("w") as file:
        if kind == "csv":
            file.write(",".join(names) + "\n")
        for step in range(1, rows + 1):
            values = (step, 0.02 * rng.lognormvariate(0, 0.3), rng.random(), rng.random(), rng.random(), 1e-6)
            if kind == "csv":
                file.write(",".join(map(repr, values)) + "\n")
            else:
                file.write(json.dumps(dict(zip(names, values, strict=True))) + "\n")


def measure(path: Path, stage: str) -> tuple[float, int]:
    """Return seconds and peak megabytes of one stage, in this process."""
    began = time.perf_counter()
    if stage == "replay":
        replay(path)
    else:
        for _ in read_rows(path) if stage == "rows" else from_log(open_log(path)):
            pass
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "csv"])
    parser.add_argument(
        "--stage", nargs=2, metavar=("STAGE", "PATH"), help="measure one stage of one file and print it"
    )
    options = parser.parse_args()
    if options.stage:
        print(*measure(Path(options.stage[1]), options.stage[0]))
        return
    print(f"{options.rows} rows        seconds  us per row  peak MB")
    with tempfile.TemporaryDirectory(prefix="kl-guard-") as folder:
        for kind in options.formats:
            path = Path(folder) / f"run.{kind}"
            write(path, kind, options.rows)
            for stage in STAGES:
                command = [sys.executable, __file__, "--stage", stage, str(path)]
                seconds, megabytes = map(float, subprocess.check_output(command, text=True).split())
                each = 1e6 * seconds / options.rows
                print(f"{kind:6} {stage:10} {seconds:10.1f} {each:11.1f} {megabytes:8.0f}", flush=True)


if __name__ == "__main__":
    main()
