"""JSON lines in a file that only grows."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_guard.paths import unused
from kl_guard.shortening import Shorten, Shortening

logger = logging.getLogger("kl_guard")

_to_line = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str).encode

RECENT = 2**21  # bytes at the end of a file that are read back
UNWRITTEN = 10_000  # lines kept in memory while the disk refuses them
RESTING = 1_000  # lines that wait for a slow disk, at most
SLOW = 0.02  # seconds that a write may take; the third in a row that takes longer is one too many
SLOW_SHARE = 0.01  # of the time, that goes into writing to a slow disk


def encode(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON; NaN and infinities become strings, since bare NaN is not JSON."""
    try:
        return _to_line(record)
    except ValueError:
        return _to_line(_plain(record))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


class LinesFile:
    """A file that lines are appended to, opened when first needed; what the disk refuses is an OSError.

    A line that was cut short, by a full disk or a killed process, is finished off by a newline, never continued. Lines
    that the disk refuses wait in memory (the last 10,000), and so do lines for a slow disk (up to 1,000), so that no
    more than a hundredth of the time goes into writing.

    Parameters
    ----------
    path:
        The file.
    shorten:
        What is kept of it when it has grown by some megabytes; None for all.
    """

    def __init__(self, path: Path, shorten: Shorten | None = None) -> None:
        self.path = path
        self._file: int | None = None
        self._size = 0
        self._ends_torn = False
        self._waiting: deque[bytes] = deque(maxlen=UNWRITTEN)
        self._slow = 0
        self._writing = False
        self._rests_until = 0.0
        self._shortening = None if shorten is None else Shortening(path, shorten)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def waiting(self) -> bool:
        """Whether there are lines that are not in the file yet."""
        return bool(self._waiting)

    @property
    def gone(self) -> bool:
        """Whether the file was open and has been deleted: what is written to it is lost."""
        return self._file is not None and os.fstat(self._file).st_nlink == 0

    def append(self, lines: bytes) -> None:
        """Take lines, each of which ends in a newline, that are not to be without each other; `flush` writes them."""
        self._waiting.append(lines)

    def drop_waiting(self) -> None:
        """Forget the lines that are not in the file yet."""
        self._waiting.clear()

    def flush(self, *, sync: bool = False) -> None:
        """Write what waits, where the disk is not too slow for it; with `sync` all is on the disk afterwards."""
        try:
            if self._waiting and (sync or len(self._waiting) >= RESTING or time.monotonic() >= self._rests_until):
                self._write()
            if sync and self._file is not None:
                os.fsync(self._file)
        except OSError:
            self.close()  # opened again, a file may be there that was not (a server that went and came)
            raise
        if self._shortening is not None and not self._ends_torn and self._shortening.consider(self._size):
            self._finish_shortening()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def finish(self) -> None:
        """Close the file for good, with what still runs in the background."""
        if self._shortening is not None and self._shortening.running:
            self._finish_shortening()
        self.close()

    def disown(self) -> None:
        """In a forked child: have nothing to do with the file any more."""
        self.close()
        self._waiting.clear()
        self._shortening = None

    def _write(self) -> None:
        if self._file is None:
            self._file, self._writing = self._open(), False
        if self._writing:  # an interrupt came after the last write and before the account of it
            self._account_for(os.fstat(self._file).st_size - self._size)
        data = b"".join(self._waiting)
        if self._ends_torn:
            data = b"\n" + data
        self._writing = True
        began = time.monotonic()
        try:
            written = os.write(self._file, data)
        finally:
            self._note_time(time.monotonic() - began)
        self._account_for(written)
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def _account_for(self, written: int) -> None:
        """Let go of the lines that are in the file now; interrupted, at most one of them is written twice."""
        rest = written
        if self._ends_torn and rest:
            self._ends_torn = False
            self._size += 1
            rest -= 1
        while self._waiting and rest >= len(self._waiting[0]):
            rest -= len(self._waiting[0])
            self._size += len(self._waiting[0])
            self._waiting.popleft()
        if rest:
            self._ends_torn = True
            self._size += rest
        self._writing = False

    def _note_time(self, seconds: float) -> None:
        self._slow = self._slow + 1 if seconds > SLOW else 0
        if self._slow >= 3:
            self._rests_until = time.monotonic() + seconds / SLOW_SHARE

    def _open(self) -> int:
        if self._shortening is not None:
            self._shortening.give_up()
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        self._size = size = os.lseek(file, 0, os.SEEK_END)
        self._ends_torn = False
        if size:
            os.lseek(file, size - 1, os.SEEK_SET)
            self._ends_torn = os.read(file, 1) != b"\n"
        return file

    def _finish_shortening(self) -> None:
        if self._shortening is not None and self._shortening.finish():
            self.close()


class JsonLines:
    """Records that may be lost, one a line: a disk that refuses costs lines, said once.

    What the guard decides by is in its journal.

    Parameters
    ----------
    path:
        The file.
    shorten:
        What is kept of it when it has grown by some megabytes; None for all.
    """

    def __init__(self, path: Path, shorten: Shorten | None = None) -> None:
        self.path = path
        self._file = LinesFile(path, shorten)
        self._complained = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self._file.append(encode(record).encode() + b"\n")
        self._flush()

    def _flush(self, *, sync: bool = False) -> None:
        try:
            if self._file.gone:
                self._file.close()
            self._file.flush(sync=sync)
        except OSError as error:
            self._file.drop_waiting()
            if not self._complained:
                self._complained = True
                logger.warning("kl-guard: cannot write %s (%s); watching goes on without it", self.path, error)

    def tail(self) -> Iterator[dict[str, Any]]:
        """Yield the last records, those of the last 2 MB; lines that are torn are left out."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - RECENT))
                lines = file.read().splitlines()
        except OSError:
            return
        for line in lines[1 if size > RECENT else 0 :]:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record

    def archive(self) -> None:
        """Move the file of an earlier run aside."""
        try:
            if self.path.exists():
                self.path.rename(unused(self.path.with_name(f"{self.path.stem}-earlier{self.path.suffix}")))
        except OSError as error:
            logger.warning("kl-guard: %s of an earlier run could not be put aside (%s)", self.path, error)

    def close(self) -> None:
        """Write what waits, and close the file."""
        if self._file.waiting:
            self._flush(sync=True)
        self._file.finish()

    def disown(self) -> None:
        """In a forked child: have nothing to do with the file any more."""
        self._file.disown()
