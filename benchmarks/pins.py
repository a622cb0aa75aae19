"""What pinning a checkpoint costs the training thread and the disk, beside copying it.

    python benchmarks/pins.py [--megabytes 512] [--repeats 7] [--folder .]

Each measurement begins with a checkpoint that was just written and is still in memory, as a trainer leaves it. Plain
copies (`shutil.copytree`) and pins are made in turn, in another order at each repeat; what is shown are medians. The
training thread waits for `PinStore.pin`, everything else is done on a background thread. Where links cannot be made
(here `os.link` is made to fail as it does across file systems) the pin is a copy, made in the background. The last
rows show what such work costs a save that the trainer makes right after it began. `worst` is the largest share of a
single repeat. Exit status 1 when a target is not met. Needs five times the checkpoint's size in FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from kl_guard.checkpoints import PinStore

TARGET = 0.05
FEWEST = 5
SMALL_FILES = {  # bytes; the files of the tokenizer are just small enough to be copied, the worst case
    "config.json": 1_400,
    "generation_config.json": 200,
    "merges.txt": 900_000,
    "rng_state.pth": 14_500,
    "scheduler.pt": 1_500,
    "tokenizer.json": 1_000_000,
    "tokenizer_config.json": 7_300,
    "trainer_state.json": 400_000,
    "training_args.bin": 7_200,
    "vocab.json": 800_000,
}
Measured = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A line of the table: two measured quantities by name, and the target for their ratio, if there is one."""

    title: str
    part: str
    whole: str
    target: float | None = None
    unit: str = "ms"


ROWS = (
    Row("training thread, linked", "linked: thread", "copy: time", TARGET),
    Row("training thread, links fail", "copied: thread", "copy: time", TARGET),
    Row("disk space, linked", "linked: space", "copy: space", TARGET, "MB"),
    Row("until the pin is complete, linked", "linked: total", "copy: time"),
    Row("until the pin is complete, links fail", "copied: total", "copy: time"),
    Row("a save meanwhile, linked", "linked: save", "copy: time"),
    Row("a save meanwhile, links fail", "copied: save", "copy: time"),
)


class Bench:
    """Measures one thing at a time, each with a new step and a checkpoint just written; leaves nothing behind.

    Parameters
    ----------
    folder:
        An empty folder to work in.
    megabytes:
        Size of the checkpoint's large files together.
    """

    def __init__(self, folder: Path, megabytes: float) -> None:
        self._folder = folder
        self._model = folder / "model"
        self._store = PinStore(folder / "pins", "benchmark")
        self._step = 0
        size = round(megabytes * 1e6)
        write(self._model, {"model.safetensors": size // 3, "optimizer.pt": size - size // 3, **SMALL_FILES})

    def copy(self) -> Measured:
        """Copy a checkpoint on the calling thread."""
        with self._checkpoint() as source, self._removed("copy") as target:
            took = milliseconds(lambda: shutil.copytree(source, target))
            return {"copy: time": took, "copy: space": space(target)}

    def pin(self, *, links: bool) -> Measured:
        """Pin a checkpoint and wait for the background thread."""
        name = "linked" if links else "copied"
        with self._checkpoint() as source, self._pinned() as pin:
            began = time.perf_counter()
            thread = self._begin(source, links=links)
            self._store.wait()
            total = (time.perf_counter() - began) * 1e3
            self._check(pin)
            return {f"{name}: thread": thread, f"{name}: total": total, f"{name}: space": space(pin)}

    def save_meanwhile(self, *, links: bool) -> Measured:
        """Write another checkpoint right after a pin was begun."""
        name = "linked" if links else "copied"
        with self._checkpoint() as source, self._pinned() as pin, self._removed("copy") as target:
            self._begin(source, links=links)
            took = milliseconds(lambda: shutil.copytree(self._model, target))
            self._store.wait()
            self._check(pin)
            return {f"{name}: save": took}

    def close(self) -> None:
        """Stop the background thread."""
        self._store.close()

    def _begin(self, source: Path, *, links: bool) -> float:
        """Begin a pin; return how long the caller had to wait, in milliseconds."""
        with contextlib.nullcontext() if links else patch("kl_guard.checkpoints.pins.os.link", refuse):
            began = time.perf_counter()
            done = self._store.pin(self._step, source, calm=True)
            took = (time.perf_counter() - began) * 1e3
        if not done:
            raise RuntimeError(f"checkpoint {source} was not pinned")
        return took

    def _check(self, pin: Path) -> None:
        if [made.path for made in self._store.pins()] != [pin]:
            raise RuntimeError(f"{pin} was not completed")

    @contextlib.contextmanager
    def _checkpoint(self) -> Iterator[Path]:
        self._step += 1
        with self._removed(f"checkpoint-{self._step}") as path:
            shutil.copytree(self._model, path)
            yield path

    def _pinned(self) -> contextlib.AbstractContextManager[Path]:
        return self._removed(f"pins/step-{self._step}")

    @contextlib.contextmanager
    def _removed(self, name: str) -> Iterator[Path]:
        path = self._folder / name
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def write(folder: Path, sizes: dict[str, int]) -> None:
    """Write files of these sizes, in bytes, full of noise."""
    rng = random.Random(0)
    folder.mkdir()
    for name, size in sizes.items():
        with (folder / name).open("wb") as file:
            for begin in range(0, size, 1 << 22):
                file.write(rng.randbytes(min(1 << 22, size - begin)))


def refuse(source: str | Path, target: str | Path) -> None:
    """Stand in for `os.link` where source and target are on different file systems."""
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))


def milliseconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def space(folder: Path) -> float:
    """Return the megabytes on the disk that a folder does not share with others by hard links."""
    stats = [path.stat() for path in [folder, *folder.rglob("*")] if path.is_dir() or path.stat().st_nlink == 1]
    return sum(stat.st_blocks for stat in stats) * 512 / 1e6


def measure(folder: Path, megabytes: float, repeats: int) -> dict[str, list[float]]:
    """Return every measured quantity, one value per repeat; a first, cold round is not counted."""
    bench = Bench(folder, megabytes)
    jobs: list[Callable[[], Measured]] = [
        bench.copy,
        lambda: bench.pin(links=True),
        lambda: bench.pin(links=False),
        lambda: bench.save_meanwhile(links=True),
        lambda: bench.save_meanwhile(links=False),
    ]
    out: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        first = repeat // 2 % len(jobs)
        turn = jobs[first:] + jobs[:first]
        for job in turn if repeat % 2 else reversed(turn):
            for name, value in job().items():
                if repeat > 0:
                    out.setdefault(name, []).append(value)
    bench.close()
    return out


def main() -> int:
    """Print the table; return 1 when a target is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=512, help="size of model and optimizer together")
    parser.add_argument("--repeats", type=int, default=7, help=f"at least {FEWEST}")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to work: the disk that is measured")
    options = parser.parse_args()
    if options.repeats < FEWEST:
        parser.error(f"--repeats must be at least {FEWEST}, got {options.repeats}")
    if options.megabytes <= 0:
        parser.error(f"--megabytes must be above 0, got {options.megabytes:g}")
    logging.basicConfig(format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="kl-guard-", dir=options.folder) as folder:
        measured = measure(Path(folder), options.megabytes, options.repeats)

    files = len(SMALL_FILES) + 2
    print(f"Checkpoint of {options.megabytes:g} MB in {files} files, medians of {options.repeats} repeats:\n")
    print(f"{'':<38} {'guard':>10} {'plain copy':>10} {'share':>8} {'worst':>8}  target")
    kept = True
    for row in ROWS:
        parts, wholes = measured[row.part], measured[row.whole]
        part, whole = statistics.median(parts), statistics.median(wholes)
        worst = max(a / b for a, b in zip(parts, wholes, strict=True))
        verdict = ""
        if row.target is not None:
            met = part / whole < row.target
            kept &= met
            verdict = f"under {row.target:.0%}: {'met' if met else 'NOT met'}"
        cells = f"{part:>7.2f} {row.unit} {whole:>7.1f} {row.unit} {part / whole:>8.2%} {worst:>8.2%}"
        print(f"{row.title:<38} {cells}  {verdict}".rstrip())
    print(f"\nTargets: {'all met' if kept else 'NOT all met'}.")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
