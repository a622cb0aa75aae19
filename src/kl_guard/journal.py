"""The append-only memory of a run: one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kl_guard.blocks import in_blocks
from kl_guard.lines import LinesFile, encode
from kl_guard.paths import safe_name, unused

logger = logging.getLogger("kl_guard")

NAMED = 10  # lines that cannot be read and are named; of the others there is the number

_WRITERS: weakref.WeakValueDictionary[str, Journal] = weakref.WeakValueDictionary()  # by folder, in this process


def read_journal(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of a journal and a note for each line that could not be read.

    A torn last line, as a killed process leaves it, is such a line: what stands before it is used. A line that comes
    twice in a row counts once: a process was interrupted before it knew that the line was written.

    Raises
    ------
    OSError
        If the file cannot be opened.
    """
    notes: list[str] = []
    return list(records_of(path, notes)), notes


def records_of(path: str | os.PathLike[str], notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal, as `read_journal` returns them, and put its notes into `notes`."""
    before = b""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line == before or not line.strip():
                continue
            before = line
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("type"), str):
                    raise ValueError("not a journal record")
            except (ValueError, RecursionError):
                notes.append(f"{path}: line {number} is torn or not a record; it is left out")
            else:
                yield record


class Journal:
    """Appends records to `<folder>/journal.jsonl`; never raises because of the disk.

    One process writes a folder: a second one that opens the same folder gets `locked_out` and writes nothing. In one
    process the newer journal takes over, since the older one is mostly what an interrupted run left behind; should
    that one be written to again, it says that it is not any more. While the disk refuses lines they are kept in memory
    (the last 10,000) and written when it takes them again. Old observations are put together in blocks, see
    `kl_guard.blocks`.

    Parameters
    ----------
    folder:
        Where the journal lives; made when first needed.
    retell:
        Gives records that add up to what is known now, for a folder that somebody deletes during the run.
    """

    def __init__(
        self, folder: str | os.PathLike[str], retell: Callable[[], Iterable[Mapping[str, Any]]] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "journal.jsonl"
        self.locked_out = False
        self.unreadable = False
        self._lock = FileLock(self.folder / "lock")
        self._file = LinesFile(self.path, in_blocks)
        self.failing = False
        self._retell = retell
        self._complained = False
        self._noted: set[str] = set()
        self._handed_over = False

    def acquire(self) -> bool:
        """Become the writer of the folder, without waiting; say so once where another one is."""
        if self.locked_out:
            if self._handed_over:
                self._handed_over = False
                logger.warning(
                    "kl-guard: a newer guard of this process is writing %s; this one watches, but keeps no journal and "
                    "no checkpoints",
                    self.folder,
                )
            return False
        if self._lock.is_locked:
            if self._file.gone:
                self._begin_anew()
            return True
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
        except (OSError, NotImplementedError) as error:  # the latter for a disk that has no locks
            self._complain(error)
        return not self.locked_out

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records on disk, none where there are none; unreadable lines are logged at the end, each once.

        Where the file is there and cannot be read, `unreadable` is set: what it holds is not known, not nothing.
        """
        notes: list[str] = []
        try:
            yield from records_of(self.path, notes)
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable = True
            logger.warning("kl-guard: %s cannot be read (%s)", self.path, error)
            return
        news = [note for note in notes if note not in self._noted]
        self._noted.update(news)
        for note in news[:NAMED]:
            logger.warning("kl-guard: %s", note)
        if len(news) > NAMED:
            logger.warning("kl-guard: %s: %d more lines are torn or not records", self.path, len(news) - NAMED)

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
        self._append([record], sync=sync)

    def write_together(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records that must not be without each other, by one write; they are on the disk when this returns."""
        self._append(records, sync=True)

    def _append(self, records: Iterable[Mapping[str, Any]], *, sync: bool) -> None:
        if self.locked_out:
            self.acquire()  # which says so
            return
        self._file.append(b"".join(encode(record).encode() + b"\n" for record in records))
        self._flush(sync=sync)

    def _flush(self, *, sync: bool) -> None:
        try:
            if self.acquire():
                self._file.flush(sync=sync)
                self.failing = False
        except FileNotFoundError as error:
            if self._lock.is_locked:
                self._begin_anew()
            else:
                self._complain(error)
        except OSError as error:
            self._complain(error)

    def _begin_anew(self) -> None:
        """Write down again what is known, where the folder was deleted while the run goes on."""
        logger.warning("kl-guard: %s was deleted; it is begun anew with what this process knows", self.path)
        self._file.close()
        self._lock.release()
        if self._retell is not None:
            self._file.drop_waiting()  # what waits is known
            for record in self._retell():
                self._file.append(encode(record).encode() + b"\n")
        self._flush(sync=True)

    def close(self) -> None:
        """Write what the disk refused so far, close the file and let go of the folder."""
        if self._file.waiting:
            self._flush(sync=True)
        self._file.finish()
        self._lock.release()

    def hand_over(self) -> None:
        """Stop writing: another journal of this process does, from now on."""
        self.close()
        self.locked_out = self._handed_over = True

    def disown(self) -> None:
        """In a forked child: write nothing, and leave the lock to the parent."""
        self.locked_out = True
        self._file.disown()
        _WRITERS.clear()

    def _complain(self, error: Exception) -> None:
        self.failing = True
        if not self._complained:
            self._complained = True
            logger.warning("kl-guard: cannot write %s (%s); watching goes on without it", self.folder, error)
