"""JSON lines in a file that only grows."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_guard.paths import unused

logger = logging.getLogger("kl_guard")

_to_line = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str).encode

RECENT = 2**21  # bytes at the end of a file that are read back


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

    A line that was cut short, by a full disk or a killed process, is finished off by a newline, never continued.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._ends_torn = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def append(self, line: bytes) -> None:
        """Append one line, which ends in a newline."""
        if self._file is None:
            self._file = self._open()
        data = b"\n" + line if self._ends_torn else line
        written = os.write(self._file, data)
        if written:
            self._ends_torn = written < len(data)
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        size = os.lseek(file, 0, os.SEEK_END)
        if size:
            os.lseek(file, size - 1, os.SEEK_SET)
            self._ends_torn = os.read(file, 1) != b"\n"
        return file


class JsonLines:
    """Records that may be lost, one a line: a disk that refuses costs lines, said once.

    What the guard decides by is in its journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = LinesFile(path)
        self._complained = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        try:
            self._file.append(encode(record).encode() + b"\n")
        except OSError as error:
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
        """Close the file."""
        self._file.close()
