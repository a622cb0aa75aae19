"""The guard's own journal as a log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from kl_guard.config import KLKind
from kl_guard.logs.base import Log, Row
from kl_guard.logs.text import Lines
from kl_guard.memory import recall, senseless

_TYPES = frozenset(
    {
        "run",
        "observation",
        "block",
        "facts",
        "finding",
        "checkpoint",
        "resume",
        "rollback",
        "decision",
        "change",
        "alert",
    }
)


def is_record(row: Any) -> bool:
    """Return whether an object is a record of a journal."""
    return isinstance(row, Mapping) and row.get("type") in _TYPES and ("run_id" in row or row["type"] != "run")


class JournalLog(Log):
    """The observations that a journal adds up to: what a resume or a rollback took away is not there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines = Lines(path, self.notes)

    def rows(self) -> Iterator[Row]:  # noqa: D102
        self.notes.clear()
        self._lines.on_share = self.on_share
        memory = recall(self._records())
        if memory.unreadable:
            self.notes.add("senseless", f"{self.path}: {senseless(memory.unreadable)}")
        for observation in memory.history:
            yield observation.known()

    def _records(self) -> Iterator[Row]:
        for line in self._lines:
            if not line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not is_record(record):
                what = "torn" if self._lines.torn else "no record of a journal"
                self.notes.add(what, f"{self.path}: line {self._lines.number} is {what}; it is left out")
                continue
            if record["type"] == "run":
                self._know(record.get("config"))
            yield record

    def _know(self, config: Any) -> None:
        if isinstance(config, Mapping):
            kind = config.get("kl_kind")
            self.kind = kind if kind in get_args(KLKind) else None
            self.rounded = config.get("rounded") is True
