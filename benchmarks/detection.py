"""How well blow-ups are told from healthy runs: kl-guard beside its peers, live on the same recorded series.

    python benchmarks/detection.py [FOLDER] [--details]

FOLDER (`benchmarks/runs` where none is given, recorded by `record_runs.py`) holds `labels.csv` (id, critical = yes, no
or either, cause, cause_step, latest) and `series/<id>.csv` (step, kl and what else was logged). A cause_step without a
cause is an onset judged by eye: nothing is measured from it. Every tool sees one observation after the other and is
asked when it would first have stopped the run. The peers are installed from PyPI into a folder of their own, beside
this file, when they are not there.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import logging
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers

from kl_guard import GuardConfig, KLGuard
from kl_guard.observation import Observation

Row = Mapping[str, float | None]
PEER_FOLDER = Path(__file__).parent / ".peers"
OWN = Path(__file__).parent / "runs"


@dataclass(frozen=True)
class Series:
    """One labelled series."""

    id: str
    critical: str
    cause_step: int | None
    latest: int | None
    rows: Sequence[Row]


@dataclass(frozen=True)
class Tool:
    """A tool under test: its name, and what gives the steps of its first halt and of its estimate of the cause."""

    name: str
    run: Callable[[Sequence[Row]], tuple[int | None, int | None]]


def install_peers() -> None:
    """Install the peers into their own folder, and make it importable."""
    sys.path.append(str(PEER_FOLDER))
    if peers.missing_peers():
        packages = [f"{name}=={version}" for name, version in peers.PINNED.items()]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*command, str(PEER_FOLDER), *packages, "slack-sdk"], check=True)
        importlib.invalidate_caches()


def read_series(folder: Path) -> list[Series]:
    """Read a folder of labelled series.

    Raises
    ------
    OSError
        If a file is missing.
    """
    with (folder / "labels.csv").open(newline="") as file:
        labels = list(csv.DictReader(file))
    out = []
    for label in labels:
        with (folder / "series" / f"{label['id']}.csv").open(newline="") as file:
            rows = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
        cause = _step(label["cause_step"]) if label["cause"] else None
        out.append(Series(label["id"], label["critical"], cause, _step(label["latest"]), rows))
    return out


def _number(text: str) -> float | None:
    return float(text) if text else None


def _step(text: str) -> int | None:
    return int(text) if text else None


def kl_guard(**overrides: Any) -> Callable[[Sequence[Row]], tuple[int | None, int | None]]:
    """Return kl-guard with its defaults and `overrides`, as a function of the rows."""
    config = GuardConfig.build(**overrides)

    def run(rows: Sequence[Row]) -> tuple[int | None, int | None]:
        guard = KLGuard(config, rank=0, expected_observations=len(rows), announce=False)
        for number, row in enumerate(rows, start=1):
            step = row.get("step")
            observation = Observation.from_mapping(row, number if step is None else step)
            decision = guard.observe(**observation.known())
            if decision.reason:
                return decision.reason.step, decision.reason.departure_step
        return None, None

    return run


def tools() -> list[Tool]:
    """Return kl-guard with both horizons, and every peer that is installed."""
    out = [Tool("kl-guard", kl_guard()), Tool("kl-guard, horizon='run'", kl_guard(horizon="run"))]
    for peer in peers.available_peers():

        def run(rows: Sequence[Row], peer: peers.Peer = peer) -> tuple[int | None, int | None]:
            alarm = peer.run(rows)
            return alarm.critical_step, alarm.onset_step

        looks = "each step" if peer.every == 1 else f"every {peer.every}"
        out.append(Tool(f"{peer.name} {peer.version}, {looks}", run))
    return out


@dataclass
class Result:
    """What a tool did on labelled series; steps are behind (delays) or around (onsets) the step of the cause."""

    tool: str
    bad: int = 0
    good: int = 0
    good_steps: int = 0
    caught: int = 0
    in_time: int = 0
    premature: int = 0
    false_halts: int = 0
    broken: int = 0
    broken_caught: int = 0
    seconds: float = 0.0
    delays: list[int] = field(default_factory=list)
    onsets: list[int] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        """Return its row of the table."""
        return [
            self.tool,
            f"{self.caught} of {self.bad}",
            f"{self.in_time} of {self.bad}",
            str(self.premature),
            f"{self.false_halts} of {self.good}",
            f"{1000 * self.false_halts / self.good_steps:.2f}" if self.good_steps else "-",
            _median(self.delays),
            str(max(self.delays)) if self.delays else "-",
            _median(self.onsets),
            f"{self.broken_caught} of {self.broken}",
            f"{self.seconds:.1f}",
        ]


def judge(tool: Tool, series: Sequence[Series]) -> Result:
    """Run a tool over all series."""
    result = Result(tool.name)
    began = time.perf_counter()
    for one in series:
        step, onset = tool.run(one.rows)
        if one.critical == "no":
            _judge_healthy(result, one, step)
        elif one.critical == "yes":
            _judge_blow_up(result, one, step, onset)
    result.seconds = time.perf_counter() - began
    return result


def _judge_healthy(result: Result, one: Series, step: int | None) -> None:
    """Count the steps of a healthy run up to its end, or to a false halt."""
    result.good += 1
    for number, row in enumerate(one.rows, start=1):
        at = row.get("step")
        if step is not None and (number if at is None else at) > step:
            break
        result.good_steps += 1
    if step is not None:
        result.false_halts += 1
        result.details.append(f"{one.id}: false halt at {step}")


def _judge_blow_up(result: Result, one: Series, step: int | None, onset: int | None) -> None:
    result.bad += 1
    early = step is not None and one.cause_step is not None and step < one.cause_step
    late = step is not None and one.latest is not None and step > one.latest
    not_finite = any(kl is not None and not math.isfinite(kl) for kl in (row.get("kl") for row in one.rows))
    result.broken += not_finite
    result.premature += early
    if step is None or early or late:
        word = "missed" if step is None else "before the cause" if early else "late"
        result.details.append(f"{one.id}: {word} ({step}; cause {one.cause_step}, latest {one.latest})")
    if step is None or early:
        return
    result.caught += 1
    result.in_time += not late
    result.broken_caught += not_finite
    if one.cause_step is not None:
        result.delays.append(step - one.cause_step)
        if onset is not None and one.cause_step > 1:
            result.onsets.append(abs(onset - one.cause_step))


def _median(values: Sequence[int]) -> str:
    return f"{statistics.median(values):g}" if values else "-"


HEADER = [
    "tool",
    "caught",
    "in time",
    "before cause",
    "false halts",
    "per 1,000 healthy steps",
    "median delay",
    "worst delay",
    "onset error",
    "NaN and inf caught",
    "seconds",
]


def main() -> int:
    """Print the table; return 1 when kl-guard misses one or halts a healthy run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=OWN, help="folder of labelled series; the project's own"
    )
    parser.add_argument("--details", action="store_true", help="also list what each tool missed or halted wrongly")
    options = parser.parse_args()
    if not (options.folder / "labels.csv").is_file():
        parser.error(f"{options.folder} holds no labels.csv")
    install_peers()
    for missing in peers.missing_peers():
        print(f"left out: {missing}")
    logging.disable(logging.CRITICAL)
    series = read_series(options.folder)
    print(f"{len(series)} series; delay and onset error in steps, behind and around the step of the cause.\n")
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    results = []
    for tool in tools():
        results.append(judge(tool, series))
        print("| " + " | ".join(results[-1].row()) + " |", flush=True)
    if options.details:
        for result in results:
            print(f"\n{result.tool}:", *(result.details or ["nothing"]), sep="\n  ")
    return int(bool(results[0].details))


if __name__ == "__main__":
    sys.exit(main())
