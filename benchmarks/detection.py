"""How well blow-ups are told from healthy runs: kl-guard beside its peers, live on the same recorded series.

    python benchmarks/detection.py FOLDER [--details]

FOLDER holds `labels.csv` (id, critical = yes, no or either, cause, cause_step, latest) and `series/<id>.csv` (step, kl
and what else was logged). A cause_step without a cause is an onset judged by eye: nothing is measured from it. Every
tool sees one observation after the other and is asked when it would first have stopped the run. The peers are installed
from PyPI into a folder of their own, beside this file, when they are not there.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers

from kl_guard import GuardConfig, KLGuard
from kl_guard.observation import Observation

Row = Mapping[str, float | None]
PEER_FOLDER = Path(__file__).parent / ".peers"


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
    candidates = [*peers.available_peers(), *(p for p in peers.available_peers(every=1) if p.name == "rlprobe")]
    for peer in candidates:

        def run(rows: Sequence[Row], peer: peers.Peer = peer) -> tuple[int | None, int | None]:
            alarm = peer.run(rows)
            return alarm.critical_step, alarm.onset_step

        looks = "each step" if peer.every == 1 else f"every {peer.every}"
        out.append(Tool(f"{peer.name} {peer.version}, {looks}", run))
    return out


def judge(tool: Tool, series: Sequence[Series]) -> tuple[list[str], list[str]]:
    """Run a tool over all series; return its row of the table and a line for each thing worth knowing."""
    caught = in_time = premature = false_halts = 0
    delays: list[int] = []
    departures: list[int] = []
    details: list[str] = []
    began = time.perf_counter()
    for one in series:
        step, departure = tool.run(one.rows)
        must, must_not = one.critical == "yes", one.critical == "no"
        if step is not None and must_not:
            false_halts += 1
            details.append(f"{one.id}: false halt at {step}")
        if not must:
            continue
        early = step is not None and one.cause_step is not None and step < one.cause_step
        late = step is not None and one.latest is not None and step > one.latest
        premature += early
        if step is None or early or late:
            word = "missed" if step is None else "before the cause" if early else "late"
            details.append(f"{one.id}: {word} ({step}; cause {one.cause_step}, latest {one.latest})")
        if step is None or early:
            continue
        caught += 1
        in_time += not late
        if one.cause_step is not None:
            delays.append(step - one.cause_step)
            if departure is not None and one.cause_step > 1:
                departures.append(abs(departure - one.cause_step))
    bad = sum(s.critical == "yes" for s in series)
    good = sum(s.critical == "no" for s in series)
    row = [
        tool.name,
        f"{caught} of {bad}",
        f"{in_time} of {bad}",
        str(premature),
        f"{false_halts} of {good}",
        _median(delays),
        _median(departures),
        f"{time.perf_counter() - began:.1f}",
    ]
    return row, details


def _median(values: Sequence[int]) -> str:
    return f"{statistics.median(values):g}" if values else "-"


HEADER = [
    "tool",
    "caught",
    "in time",
    "before cause",
    "false halts",
    "median delay",
    "onset error",
    "seconds",
]


def main() -> int:
    """Print the table; return 1 when kl-guard misses one or halts a healthy run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of labelled series")
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
    ours = math.inf
    told: list[tuple[str, list[str]]] = []
    for tool in tools():
        row, details = judge(tool, series)
        print("| " + " | ".join(row) + " |", flush=True)
        told.append((tool.name, details))
        ours = min(ours, len(details)) if tool.name == "kl-guard" else ours
    if options.details:
        for name, details in told:
            print(f"\n{name}:", *(details or ["nothing"]), sep="\n  ")
    return int(ours > 0)


if __name__ == "__main__":
    sys.exit(main())
