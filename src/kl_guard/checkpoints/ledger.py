"""Which checkpoints a run has, and whether one is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kl_guard.checkpoints.manifest import Manifest
from kl_guard.findings import Checkpoint


class Ledger:
    """The checkpoints that a run has saved, by step; saved again, a step's later folder counts.

    Examples
    --------
    >>> ledger = Ledger()
    >>> ledger.add(Checkpoint(10, "checkpoint-10"))
    >>> [checkpoint.step for checkpoint in ledger]
    [10]
    """

    def __init__(self) -> None:
        self._by_step: dict[int, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._by_step)

    def __iter__(self) -> Iterator[Checkpoint]:
        return (self._by_step[step] for step in sorted(self._by_step))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(steps={sorted(self._by_step)})"

    def add(self, checkpoint: Checkpoint) -> None:
        """Take in a checkpoint that was saved or found."""
        self._by_step[checkpoint.step] = checkpoint

    def forget_after(self, step: int) -> None:
        """Drop what was saved after `step`: the run has gone back behind it."""
        self._by_step = {s: c for s, c in self._by_step.items() if s <= step}


def is_whole(path: str, manifest: Manifest | None = None) -> bool:
    """Return whether a checkpoint's folder is there and sound, as far as can be told.

    With a manifest every file is compared with it; without one no file may be empty, and there must be some.
    """
    folder = Path(path)
    try:
        if manifest is not None:
            return not any(manifest.problems(folder))
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    except (OSError, ValueError):  # a name that is too long, a network folder that has gone stale, ...
        return False
    return bool(sizes) and all(sizes)
