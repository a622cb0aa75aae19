"""The append-only memory of a run: one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kl_guard.lines import LinesFile, encode
from kl_guard.paths import safe_name, unused

logger = logging.getLogger("kl_guard")

UNWRITTEN = 10_000  # lines kept in memory while the disk refuses them
_WRITERS: weakref.WeakValueDictionary[str, Journal] = weakref.WeakValueDictionary()  # by folder, in this process


def read_journal(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of a journal and a note for each line that could not be read.

    A torn last line, as a killed process leaves it, is such a line: what stands before it is used.

    Raises
    ------
    OSError
        If the file cannot be opened.
    """
    records: list[dict[str, Any]] = []
    notes: list[str] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("type"), str):
                    raise ValueError("not a journal record")
                records.append(record)
            except (ValueError, RecursionError):
                notes.append(f"{path}: line {number} is torn or not a record; it is left out")
    return records, notes


class Journal:
    """Appends records to `<folder>/journal.jsonl`; never raises because of the disk.

    One process writes a folder: a second one that opens the same folder gets `locked_out` and writes nothing. In one
    process the newer journal takes over, since the older one is what an interrupted run left behind. While the
    disk refuses lines they are kept in memory (the last 10,000) and written when it takes them again.

    Parameters
    ----------
    folder:
        Where the journal lives; made when first needed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "journal.jsonl"
        self.locked_out = False
        self.unreadable = False
        self._lock = FileLock(self.folder / "lock")
        self._file = LinesFile(self.path)
        self._unwritten: deque[bytes] = deque(maxlen=UNWRITTEN)
        self._complained = False

    def acquire(self) -> bool:
        """Become the writer of the folder, without waiting; say so once where another process is."""
        if self.locked_out or self._lock.is_locked:
            return not self.locked_out
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            before = _WRITERS.get(os.fspath(self.folder.resolve()))
            if before is not None and before is not self:
                before.hand_over()
            self._lock.acquire(timeout=0)
            _WRITERS[os.fspath(self.folder.resolve())] = self
        except Timeout:
            self.locked_out = True
            logger.warning("kl-guard: another guard is writing %s; this one watches, but keeps no journal", self.folder)
        except OSError as error:
            self._complain(error)
        return not self.locked_out

    def read(self) -> list[dict[str, Any]]:
        """Return the records on disk, [] where there are none; unreadable lines are logged.

        Where the file is there and cannot be read, `unreadable` is set: what it holds is not known, not nothing.
        """
        try:
            records, notes = read_journal(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.unreadable = True
            logger.warning("kl-guard: %s cannot be read (%s)", self.path, error)
            return []
        for note in notes:
            logger.warning("kl-guard: %s", note)
        return records

    def archive(self) -> None:
        """Move a journal of an earlier run aside, under its run id, so that a new one can begin."""
        if not self.path.exists() or not self.acquire():
            return
        run_id = next((str(r["run_id"]) for r in self.read() if r["type"] == "run" and "run_id" in r), "unknown")
        try:
            self._file.close()
            self.path.rename(unused(self.folder / f"journal-{safe_name(run_id)}.jsonl"))
        except OSError as error:
            self._complain(error)

    def write(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append one record; with `sync` it is on the disk when this returns."""
        if self.locked_out:
            return
        self._unwritten.append(encode(record).encode() + b"\n")
        self._flush(sync=sync)

    def write_together(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records that must not be without each other, by one write; they are on the disk when this returns."""
        if self.locked_out:
            return
        self._unwritten.append(b"".join(encode(record).encode() + b"\n" for record in records))
        self._flush(sync=True)

    def _flush(self, *, sync: bool) -> None:
        try:
            if not self.acquire():
                return
            while self._unwritten:
                self._file.append(self._unwritten[0])
                self._unwritten.popleft()
            if sync:
                self._file.sync()
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        """Write what the disk refused so far, close the file and let go of the folder."""
        if self._unwritten:
            self._flush(sync=True)
        self._file.close()
        self._lock.release()

    def hand_over(self) -> None:
        """Stop writing: another journal of this process does, from now on."""
        self.close()
        self.locked_out = True

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("kl-guard: cannot write %s (%s); watching goes on without it", self.folder, error)
