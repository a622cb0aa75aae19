"""Old observations of a journal, a thousand of them in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kl_guard.history import History
from kl_guard.lines import encode
from kl_guard.observation import Observation
from kl_guard.shortening import EVERY, lines_of

KEEP = 2000  # observations at the end that stay as they are
SIZE = 1000  # observations in a block
FEWEST = 16  # that are worth a block
WORTH = EVERY // 4  # bytes of lines that are worth the work
_BEGINNING = b'{"type":"observation",'
# What these say has its own step: it counts the same before an observation of the same attempt and after it.
_ANYWHERE = (b'{"type":"checkpoint",', b'{"type":"finding",', b'{"type":"alert",')


def in_blocks(path: Path, upto: int) -> Iterator[bytes]:
    """Yield the first `upto` bytes of a journal with all but the last observations in blocks; nothing where few are.

    A block holds a row of observations exactly, as packed columns; checkpoints, findings and alerts that stood within
    the row come after it. All other records, and lines that cannot be read, stay as they are, where they are.
    """
    sizes = [len(line) for line in lines_of(path, upto) if line.startswith(_BEGINNING)]
    old = len(sizes) - KEEP
    if old <= 0 or sum(sizes[:old]) < WORTH:
        return
    seen, row = 0, _Row()
    for line in lines_of(path, upto):
        is_old = False
        if line.startswith(_BEGINNING):
            seen += 1
            is_old = seen <= old
        if not (row.pass_by(line) or (is_old and row.add(line))):
            yield from row.take()
            yield line
        elif len(row.history) >= SIZE:
            yield from row.take()
    yield from row.take()


class _Row:
    """Observations that follow each other in one attempt."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.history = History()
        self._lines: list[bytes] = []
        self._passing: list[bytes] = []
        self._attempt: Any = None

    def pass_by(self, line: bytes) -> bool:
        """Take in a record that may come after the row as well; return whether it is one, and there is a row."""
        if not len(self.history) or not line.startswith(_ANYWHERE):
            return False
        self._lines.append(line)
        self._passing.append(line)
        return True

    def add(self, line: bytes) -> bool:
        """Take in an observation; return whether it is one that goes on from those before."""
        try:
            record = json.loads(line)
            observation = Observation.from_mapping(record, record["step"], record.get("window", 1))
        except (KeyError, TypeError, ValueError, RecursionError):
            return False
        if len(self.history) and record.get("attempt") != self._attempt:
            return False
        if self._merges(observation) and observation.window > self.history[-1].window:
            return False  # whether a run began in its middle is told by the first window of its first step
        self._attempt = record.get("attempt")
        self._lines.append(line)
        self.history.add(observation)
        return True

    def _merges(self, observation: Observation) -> bool:
        return len(self.history) > 0 and observation.step == self.history.steps[-1]

    def take(self) -> Iterator[bytes]:
        """Yield the observations as a block, or as the lines they were where they are few, and begin anew."""
        if len(self.history) < FEWEST:
            yield from self._lines
        else:
            block = {"type": "block", "attempt": self._attempt, **self.history.packed()}
            yield encode(block).encode() + b"\n"
            yield from self._passing
        self._begin()
