"""Which checkpoints a run has."""

from __future__ import annotations

from collections.abc import Iterator

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

    def get(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step."""
        return self._by_step.get(step)

    def add(self, checkpoint: Checkpoint) -> None:
        """Take in a checkpoint that was saved or found."""
        self._by_step[checkpoint.step] = checkpoint

    def forget_after(self, step: int) -> None:
        """Drop what was saved after `step`: the run has gone back behind it."""
        self._by_step = {s: c for s, c in self._by_step.items() if s <= step}
