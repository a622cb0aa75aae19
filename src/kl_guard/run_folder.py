"""The folder of a run, as its guard keeps it: what is written to it, and what an earlier process left there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_guard import incidents
from kl_guard.config import GuardConfig
from kl_guard.findings import Decision
from kl_guard.history import History
from kl_guard.journal import Journal
from kl_guard.memory import Memory, recall, senseless


class RunFolder:
    """Journal and incidents of one run; reading works on every rank, writing on the first.

    Parameters
    ----------
    path:
        `<output_dir>/kl_guard`; None for no files.
    writes:
        Whether this process may write.
    retell:
        Yields the records that add up to what is known of the run, for a journal that has to be begun anew.
    warn:
        Told of what went wrong: a key, so that it is said once, and a text.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        writes: bool,
        retell: Callable[[], Iterable[Mapping[str, Any]]],
        warn: Callable[[str, str], None],
    ) -> None:
        self.path = path
        self._warn = warn
        self._journal = Journal(path, retell) if path is not None and writes else None
        self._past = None if path is None else Journal(path)

    @property
    def refused(self) -> bool:
        """Whether another guard has the folder."""
        return self._journal is not None and not self._journal.acquire()

    @property
    def failing(self) -> bool:
        """Whether the disk refuses the journal at present."""
        return self._journal is not None and self._journal.failing

    def is_mine(self) -> bool:
        """Whether this guard is the one that writes the folder."""
        return self._journal is not None and self._journal.acquire()

    def begin(self) -> None:
        """Put aside the journal that an earlier run left."""
        if self._journal is not None:
            self._journal.archive()

    def write(self, kind: str, fields: Mapping[str, Any], *, sync: bool = False) -> None:
        """Add a record to the journal; with `sync` it is on the disk afterwards."""
        if self._journal is not None:
            self._journal.write({"type": kind, **fields}, sync=sync)

    def write_together(self, records: list[dict[str, Any]]) -> None:
        """Add records of which a killed process leaves all or none."""
        if self._journal is not None:
            self._journal.write_together(records)

    def recall(self) -> Memory:
        """Return what the journal says; where it cannot be read nothing of the folder is touched from then on."""
        if self.path is None or self._past is None:
            return Memory()
        memory = recall(self._past.read())
        if memory.unreadable:
            self._warn("senseless", f"{self._past.path}: {senseless(memory.unreadable)}")
        if self._past.unreadable:
            self._journal = None
            self._warn("unreadable", "so this guard watches without memory, and leaves files and pins as they are")
        root = self.path.parent
        memory.checkpoints = {s: replace(c, path=os.fspath(root / c.path)) for s, c in memory.checkpoints.items()}
        return memory

    def as_written(self, path: str) -> str:
        """Return a path as the journal has it: relative to the output folder, which may be moved."""
        try:
            return (
                path if self.path is None else os.fspath(Path(path).resolve().relative_to(self.path.parent.resolve()))
            )
        except (OSError, ValueError):
            return path

    def retold(self, records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield records with their paths as the journal has them."""
        for record in records:
            yield {**record, "path": self.as_written(record["path"])} if "path" in record else record

    def write_incident(
        self, decision: Decision, config: GuardConfig, run_id: str, history: History, tokens: incidents.Tokens | None
    ) -> Path | None:
        """Write what is needed to understand a decision, and its report; return where, None where it was not."""
        if self.path is None or not self.is_mine():
            return None
        try:
            written = incidents.write(self.path, decision, config, run_id, history, tokens)
        except OSError as error:
            self._warn("incident", f"the incident could not be written: {error}")
            return None
        try:
            return incidents.write_report(self.path, written.parent)
        except Exception as error:
            self._warn("report", f"the report could not be written: {error!r}")
            return written

    def close(self) -> None:
        """Close the journal and let another guard use the folder."""
        if self._journal is not None:
            self._journal.close()

    def disown(self) -> None:
        """In a copy of the guard in another process: the files belong to the first."""
        if self._journal is not None:
            self._journal.disown()
