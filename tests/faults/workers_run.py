"""Loads data in worker processes while a guard watches and pins. `python workers_run.py FOLDER fork|spawn`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from kl_guard import GuardConfig, KLGuard
from kl_guard.checkpoints import pins


class Rows(Dataset):
    """Rows that know the guard, as a dataset that shares something with the trainer does."""

    def __init__(self, guard: KLGuard) -> None:
        self.guard = guard

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        """In a worker: everything that only the process that trains may do."""
        guard = self.guard
        guard.observe(10_000 + index, 50.0)
        guard.checkpoint_saved(10_000, os.environ["CHECKPOINT"])
        guard.note({"dropout": "said by a worker"})
        if index % 16 == 0:
            guard.close()
        lock = os.environ["LOCK"]
        held = lock in open_files()
        return torch.tensor([float(guard.refused), float(held), float(os.getpid() != int(os.environ["TRAINER"]))])


def open_files() -> list[str]:
    """The files that this process has open."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(fd.readlink()))
    return names


def main() -> None:
    """Train with workers that are made anew in each epoch."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    pins.SMALL = 1  # files are linked, none is copied: the background thread only takes checksums
    os.environ["TRAINER"] = str(os.getpid())
    os.environ["LOCK"] = str(folder / "kl_guard" / "lock")
    os.environ["CHECKPOINT"] = str(folder / "checkpoint-1")
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=folder)
    guard.observe(1, 0.02)
    step, seen = 1, []
    for _ in range(2):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "weights").write_bytes(os.urandom(1 << 25))  # its checksum takes a while
        guard.checkpoint_saved(step, checkpoint)
        workers = 2 if how == "fork" else 1  # which imports torch anew, for seconds
        loader = DataLoader(Rows(guard), batch_size=8, num_workers=workers, multiprocessing_context=how)
        for batch in loader:
            step += 1
            guard.observe(step, 0.02)
            seen += batch.tolist()
    guard.checkpoints.wait()
    guard.close()
    pinned = sorted(path.name for path in (folder / "kl_guard" / "pins").iterdir())
    print(json.dumps({"steps": step, "seen": seen, "blind": guard.blind, "pins": pinned}))


if __name__ == "__main__":
    main()
