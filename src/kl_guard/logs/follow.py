"""Rows of a log that is still being written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from kl_guard.logs.base import LineFormat, Row
from kl_guard.logs.formats import line_format
from kl_guard.logs.text import LONGEST, Notes, is_packed

_MARK = 64  # bytes at the beginning by which a file that was written anew is known


class Follower:
    """Gives the new rows of a growing file at each `poll`: JSON lines, console text or CSV.

    Only whole lines are read. When the file is cut short, written anew or replaced by another (rotation), what is left
    of the old one is read, then the new one from its beginning; `restarts` counts how often. Nothing is raised for
    lines that cannot be read: `notes` have them.

    Raises
    ------
    ValueError
        For a compressed file, which cannot be followed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.notes = Notes()
        self.restarts = 0
        self.line = 0
        self._file: BinaryIO | None = None
        self._format: LineFormat | None = None
        self._rest = b""
        self._mark = b""
        self._skips = False
        if self.path.is_file() and is_packed(self.path):
            raise ValueError(f"{self.path}: compressed, so it cannot be followed; replay reads it")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, line={self.line})"

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self) -> list[Row]:
        """Return the rows that came since the last call; [] where the file is not there yet."""
        rows: list[Row] = []
        if self._file is not None:
            if self._was_rewritten():
                self._begin_anew()
            else:
                rows += self._read()
                if self._was_replaced():
                    self._begin_anew()
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except OSError:
                return rows
            rows += self._read()
        return rows

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_anew(self) -> None:
        self.close()
        self.restarts += 1
        self.line, self._rest, self._mark, self._format, self._skips = 0, b"", b"", None, False

    def _was_rewritten(self) -> bool:
        """Whether the file that is open was cut short, or begins with something else than before."""
        if self._file is None:
            return False
        at = self._file.tell()
        if os.fstat(self._file.fileno()).st_size < at:
            return True
        self._file.seek(0)
        mark = self._file.read(_MARK)
        self._file.seek(at)
        return not mark.startswith(self._mark)

    def _was_replaced(self) -> bool:
        try:
            now = self.path.stat()
        except OSError:
            return False  # moved away and not made anew yet
        mine = os.fstat(self._file.fileno()) if self._file is not None else now
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def _read(self) -> list[Row]:
        rows: list[Row] = []
        while self._file is not None and (part := self._file.read(2**20)):
            if len(self._mark) < _MARK:
                self._mark = (self._mark + part)[:_MARK]
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                self.line += 1
                if self._skips:
                    self._skips = False
                elif len(line) > LONGEST:
                    self._note_long(self.line)
                else:
                    rows += self._rows_of(line)
            if len(self._rest) > LONGEST:
                self._note_long(self.line + 1)
                self._rest, self._skips = b"", True
        return rows

    def _note_long(self, number: int) -> None:
        self.notes.add("long", f"{self.path}: line {number} is longer than 4 MB; it is left out")

    def _rows_of(self, line: bytes) -> list[Row]:
        text = line.decode("utf-8-sig" if self.line == 1 else "utf-8", "replace").rstrip("\r")
        if self._format is None:
            if not text.strip():
                return []
            self._format = line_format(text)()
        rows = self._format.read(text)
        for back, what in self._format.damage():
            self.notes.add("line", f"{self.path}: line {self.line - back} {what}; it is left out")
        return rows
