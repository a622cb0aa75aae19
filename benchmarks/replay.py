"""What it costs to replay a recorded run: reading rows, making observations of them, and judging them.

    python benchmarks/replay.py [--rows 1000000] [--formats jsonl csv json]

Each measurement is a process of its own, so that peak memory is its own. A row has a step, KL and four more metrics.
`rows` is `read_rows`; `series` also chooses the KL, reads numbers and puts parts of a step together; `replay` judges;
`command` is `kl-guard replay LOG --report FILE` from its start to its end, on a run that blows up. `json` is a
`trainer_state.json`. Seconds are the processor's, which other work on the machine changes less than the clock's.
At last: what `kl-guard --help` takes, beside a Python that does nothing.
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

STAGES = ("rows", "series", "replay", "command")
STARTS = 20


def write(path: Path, kind: str, rows: int) -> None:
    """Write a run that is healthy up to its last hundredth."""
    rng = random.Random(0)
    names = ("step", "kl", "reward", "loss", "grad_norm", "learning_rate")
    trouble = rows - rows // 100
    with path.open("w") as file:
        file.write({"csv": ",".join(names) + "\n", "json": '{"log_history": [\n'}.get(kind, ""))
        for step in range(1, rows + 1):
            kl = 0.02 * rng.lognormvariate(0, 0.3) * 400 ** (max(0, step - trouble) / (rows - trouble))
            values = (step, kl, rng.random(), rng.random(), rng.random(), 1e-6)
            if kind == "csv":
                file.write(",".join(map(repr, values)) + "\n")
            else:
                end = "\n]}\n" if kind == "json" and step == rows else ",\n" if kind == "json" else "\n"
                file.write(json.dumps(dict(zip(names, values, strict=True))) + end)


def measure(path: Path, stage: str) -> tuple[float, int]:
    """Return seconds and peak megabytes of one stage, in this process, or for the command in one of its own."""
    if stage == "command":
        with tempfile.TemporaryDirectory(prefix="kl-guard-") as folder:
            seconds = processor_seconds("-m", "kl_guard", "replay", str(path), "--report", f"{folder}/report.html")
        return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    began = time.process_time()
    if stage == "replay":
        replay(path)
    else:
        for _ in read_rows(path) if stage == "rows" else from_log(open_log(path)):
            pass
    return time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def processor_seconds(*arguments: str) -> float:
    """Return what a Python process takes of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def starts() -> None:
    """Print what help takes, side by side with nothing at all."""
    processor, clock = [0.0, 0.0], [0.0, 0.0]
    for _ in range(STARTS):
        for index, arguments in enumerate((("-c", "pass"), ("-m", "kl_guard", "--help"))):
            began = time.perf_counter()
            processor[index] += processor_seconds(*arguments) / STARTS
            clock[index] += (time.perf_counter() - began) / STARTS
    print(f"\nmean of {STARTS} starts   processor s  clock s")
    for index, name in enumerate(("python -c pass", "kl-guard --help")):
        print(f"{name:19} {processor[index]:12.3f} {clock[index]:8.3f}")
    print(f"ratio               {processor[1] / processor[0]:12.1f} {clock[1] / clock[0]:8.1f}")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "csv", "json"])
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
    starts()


if __name__ == "__main__":
    main()
