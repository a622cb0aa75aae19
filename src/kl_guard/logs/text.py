"""The lines of a text file, compressed or not, without ever holding more than one of them."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from kl_guard.progress import Told

LONGEST = 2**22  # bytes of one line
HEAD = 2**16  # bytes that a file's kind is told by
EVERY = 256  # lines from one word on how much was read to the next
_GZIP = b"\x1f\x8b"


class Notes:
    """What was peculiar about a log, each kind of thing once with its first place and how often it came."""

    def __init__(self) -> None:
        self._notes: dict[str, list[str | int]] = {}
        self._given: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.texts})"

    def add(self, kind: str, text: str) -> None:
        """Take note; of one kind the first text is kept and the others are counted."""
        self._notes.setdefault(kind, [text, 0])
        self._notes[kind][1] = int(self._notes[kind][1]) + 1

    def count(self, kind: str) -> int:
        """Return how often a kind of thing came."""
        return int(self._notes[kind][1]) if kind in self._notes else 0

    def news(self) -> list[str]:
        """Return the texts that this has not returned yet, the first of each kind."""
        new = [str(text) for kind, (text, _) in self._notes.items() if kind not in self._given]
        self._given.update(self._notes)
        return new

    def clear(self) -> None:
        """Forget all."""
        self._notes.clear()

    @property
    def texts(self) -> list[str]:
        """The notes in words."""
        return [
            f"{text} (and {int(count) - 1} more like it)" if int(count) > 1 else str(text)
            for text, count in self._notes.values()
        ]


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked where its content is gzip.

    Raises
    ------
    OSError
        If it cannot be opened.
    """
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return cast("IO[bytes]", gzip.open(path, "rb")) if packed else path.open("rb")


def is_packed(path: Path) -> bool:
    """Return whether a file is gzip, by its content."""
    with path.open("rb") as file:
        return file.read(2) == _GZIP


def head_of(path: Path) -> bytes:
    """Return how a file begins, unpacked; what of a broken archive can be read."""
    head = b""
    with open_binary(path) as file:
        try:
            while len(head) < HEAD and (part := file.read(4096)):
                head += part
        except (EOFError, gzip.BadGzipFile, zlib.error):
            pass
    return head


def _share(file: IO[bytes]) -> float:
    """Return which share of a file was read, of its bytes on the disk where it is packed."""
    on_disk = file.fileobj if isinstance(file, gzip.GzipFile) else file
    size = os.fstat(file.fileno()).st_size
    return min(1.0, on_disk.tell() / size) if size else 1.0


class Lines:
    """The lines of a file, without their ends.

    `number` is that of the line given last; `torn` says that it is the last one and lacks its end. Lines that are too
    long are left out with a note, as is what cannot be unpacked.
    """

    def __init__(self, path: Path, notes: Notes) -> None:
        self.path = path
        self.number = 0
        self.torn = False
        self.on_share: Told | None = None
        self._notes = notes

    def __iter__(self) -> Iterator[str]:
        self.number, self.torn = 0, False
        with open_binary(self.path) as file:
            for line in self._lines(file):
                self.number += 1
                if self.on_share is not None and not self.number % EVERY:
                    self.on_share(_share(file))
                if len(line) > LONGEST:
                    self._notes.add("long", f"{self.path}: line {self.number} is longer than 4 MB; it is left out")
                    continue
                self.torn = not line.endswith(b"\n")
                if self.number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield line.rstrip(b"\r\n").decode("utf-8", "replace")

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield lines, of a long one a beginning that is just too long."""
        try:
            while line := file.readline(LONGEST + 1):
                yield line
                while len(line) > LONGEST and not line.endswith(b"\n"):
                    line = file.readline(LONGEST + 1)
                    if not line:
                        break
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            where = f"{self.path}: after line {self.number}"
            self._notes.add("packed", f"{where} the compressed data are broken ({error}); the rest is left out")
