"""The guard's own journal as a log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from kl_guard.config import GuardConfig, KLKind
from kl_guard.logs.base import Log, Row
from kl_guard.logs.tally import Tally
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

_JUDGING = (
    "halt_on",
    "ratio",
    "abs_floor",
    "sustain",
    "alpha",
    "min_observations",
    "horizon",
    "robust",
    "warmup",
    "cold_factor",
    "hard_ceiling",
    "plateau_level",
)
_DEFAULTS = asdict(GuardConfig())


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
        tally = Tally(self.notes, "no record")
        for line in self._lines:
            if not line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not is_record(record):
                place = f"{self.path}: line {self._lines.number}"
                if self._lines.torn:
                    self.notes.add("torn", f"{place} is torn; it is left out")
                else:
                    tally.bad(f"{place} is no record of a journal")
                continue
            tally.good += 1
            if record["type"] == "run":
                self._know(record.get("config"))
            yield record
        tally.settle()

    def _know(self, config: Any) -> None:
        if isinstance(config, Mapping):
            kind = config.get("kl_kind")
            self.kind = kind if kind in get_args(KLKind) else None
            self.rounded = config.get("rounded") is True
            own = {name: config.get(name, usual) for name, usual in _DEFAULTS.items() if name in _JUDGING}
            said = [f"{name}={value!r}" for name, value in own.items() if value != _DEFAULTS[name]]
            if said:
                text = f"the guard of this run had {', '.join(said)}: give that as well to judge as it did"
                self.notes.add("knobs", f"{self.path}: {text}")
