"""A file of lines made shorter while it goes on growing."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kl_guard.paths import sync

logger = logging.getLogger("kl_guard")

EVERY = 1 << 22  # bytes that a file grows by before it is looked at
WORTH = 0.9  # share of the bytes that a shorter file may have, for it to be worth taking
ROOM = 10  # times the file's size that must be free
PATIENCE = 30.0  # seconds that closing waits for it

Shorten = Callable[[Path, int], Iterator[bytes]]
"""Gives the lines to keep of the first so many bytes of a file; none at all where it is not worth the work."""


class Shortening:
    """Rewrites a file on a background thread each time it has grown by some megabytes.

    What is there at the beginning is written anew into a draft. The lines that came meanwhile are added to it by the
    thread that writes the file, and the draft takes the file's place by one rename: whenever the process is killed,
    one of the two is there and whole. Whatever goes wrong, the file stays as it is.

    Parameters
    ----------
    path:
        The file. Nobody else writes it.
    shorten:
        Says what is kept.
    """

    def __init__(self, path: Path, shorten: Shorten) -> None:
        self._path = path
        self._draft = path.with_name(f".draft-{path.name}")
        self._shorten = shorten
        self._next = EVERY
        self._thread: threading.Thread | None = None
        self._upto = self._kept = self._inode = self._draft_inode = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"

    @property
    def running(self) -> bool:
        """Whether it was begun, and `finish` has not been called."""
        return self._thread is not None

    def consider(self, size: int) -> bool:
        """Begin where the file, now of `size` bytes of whole lines, has grown enough; return whether to `finish`."""
        if self._thread is not None:
            return not self._thread.is_alive()
        if size >= self._next:
            self._next, self._upto, self._kept = size + EVERY, size, 0
            self._inode = self._path.stat().st_ino
            thread = threading.Thread(target=self._write, name="kl-guard-shortening", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter is going down
                logger.debug("kl-guard: %s stays as long as it is (%s)", self._path, error)
                return False
            self._thread = thread
        return False

    def give_up(self) -> None:
        """Have what is under way come to nothing: the file is another one, though its inode may be the same."""
        self._inode = 0

    def finish(self) -> bool:
        """Wait for the draft and put it in the place of the file; return whether that was done.

        What the file has had since is in it then; whoever has the file open must open it again.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        thread.join(PATIENCE)
        try:
            if thread.is_alive():
                self._next = sys.maxsize  # a disk that slow is left alone
                return False
            if not 0 < self._kept <= WORTH * self._upto or self._path.stat().st_ino != self._inode:
                return False
            if not self._draft_is_mine():
                return False
            with self._path.open("rb") as file, self._draft.open("r+b") as draft:
                file.seek(self._upto)
                draft.seek(0, os.SEEK_END)
                shutil.copyfileobj(file, draft)
                longer = draft.tell() + EVERY
            sync(self._draft)
            self._draft.replace(self._path)
        except OSError as error:
            logger.debug("kl-guard: %s stays as long as it is (%s)", self._path, error)
            return False
        finally:
            if not thread.is_alive():
                self._remove_draft()
        self._next = longer
        with suppress(OSError):  # some disks refuse that for a folder
            sync(self._path.parent)
        return True

    def _draft_is_mine(self) -> bool:
        """Whether the draft is there and whole: another guard, or somebody who tidies up, may have removed it."""
        there = self._draft.stat()
        return (there.st_ino, there.st_size) == (self._draft_inode, self._kept)

    def _remove_draft(self) -> None:
        with suppress(OSError):
            if self._draft.stat().st_ino == self._draft_inode:
                self._draft.unlink()

    def _write(self) -> None:
        """On the background thread."""
        try:
            if shutil.disk_usage(self._path.parent).free < ROOM * self._upto:
                return
            self._draft.unlink(missing_ok=True)  # never into one that an earlier guard may still be writing
            with self._draft.open("xb") as draft:
                self._draft_inode = os.fstat(draft.fileno()).st_ino
                kept = sum(map(draft.write, self._shorten(self._path, self._upto)))
                draft.flush()
                os.fsync(draft.fileno())
            self._kept = kept
        except Exception as error:
            logger.debug("kl-guard: %s stays as long as it is (%r)", self._path, error)


def lines_of(path: Path, upto: int) -> Iterator[bytes]:
    """Yield the lines in the first `upto` bytes of a file."""
    with path.open("rb") as file:
        for line in file:
            upto -= len(line)
            if upto < 0:
                return
            yield line
