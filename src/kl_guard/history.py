"""Everything observed in a run, in a few bytes per step."""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from kl_guard.observation import METRICS, Observation

_values = attrgetter(*METRICS)


class History:
    """The observations of the run so far, in order of steps; 24 bytes each, and 8 for each metric that the run has.

    Examples
    --------
    >>> history = History()
    >>> history.append(Observation(1, kl_mean=0.5))
    >>> history[-1].kl_mean, history[-1].loss
    (0.5, None)
    """

    __slots__ = ("_columns", "_present", "_windows", "steps")

    def __init__(self) -> None:
        self.steps = array("q")
        self._windows = array("q")
        self._present = array("Q")  # bit i: METRICS[i] was given, so that NaN and missing stay apart
        self._columns: list[array[float] | None] = [None] * len(METRICS)  # None as long as there is no value

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Observation:
        if index < 0:
            index += len(self.steps)  # what counts: an interrupt may have left a column longer, until `append`
        present = self._present[index]
        values = {
            METRICS[bit]: column[index]
            for bit, column in enumerate(self._columns)
            if column is not None and present >> bit & 1
        }
        return Observation(self.steps[index], window=self._windows[index], **values)

    def __iter__(self) -> Iterator[Observation]:
        columns = [repeat(None) if column is None else column for column in self._columns]
        whole = sum(1 << bit for bit, column in enumerate(self._columns) if column is not None)
        rows: Iterator[tuple[Any, ...]] = zip(self.steps, self._present, *columns, self._windows, strict=False)
        for i, (step, present, *rest) in enumerate(rows):
            yield Observation(step, *rest) if present == whole else self[i]

    def append(self, observation: Observation) -> None:
        """Add an observation of a later step."""
        self._cut(len(self.steps))
        present = 0
        for bit, value in enumerate(_values(observation)):
            column = self._columns[bit]
            if value is not None:
                present |= 1 << bit
                if column is None:
                    self._columns[bit] = column = _missing(len(self.steps))
                column.append(value)
            elif column is not None:
                column.append(math.nan)
        self._windows.append(observation.window)
        self._present.append(present)
        self.steps.append(observation.step)

    def replace_last(self, observation: Observation) -> None:
        """Put an observation of the same step, with more known, in place of the last one."""
        self._cut(len(self.steps) - 1)
        self.append(observation)

    def add(self, observation: Observation) -> bool:
        """Add an observation, or merge it with the last one of the same step; return whether it is a new step.

        One of an earlier step is left out.
        """
        if not self.steps or observation.step > self.steps[-1]:
            self.append(observation)
            return True
        if observation.step == self.steps[-1]:
            self.replace_last(self[-1].merged(observation))
        return False

    def column(self, name: str) -> array[float]:
        """Return one metric of all observations; NaN where it is missing."""
        column = self._columns[METRICS.index(name)]
        return _missing(len(self.steps)) if column is None else column

    def index(self, step: int) -> int:
        """Return the index of the first observation at `step` or later."""
        return bisect_left(self.steps, step)

    def truncate(self, step: int) -> None:
        """Forget what came after `step`."""
        self._cut(bisect_right(self.steps, step))

    def packed(self, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Return observations as plain values, exact and short, for `unpacked`."""
        columns = {name: c for name, c in zip(METRICS, self._columns, strict=True) if c is not None}
        given = [[bits >> METRICS.index(name) & 1 for bits in self._present[start:stop]] for name in columns]
        return {
            "steps": _pack(self.steps[start:stop]),
            "windows": _pack(self._windows[start:stop]),
            "columns": {
                name: [_pack(column[start:stop]), "all" if all(has) else _pack(array("q", has))]
                for (name, column), has in zip(columns.items(), given, strict=True)
                if any(has)
            },
        }

    @classmethod
    def unpacked(cls, data: Mapping[str, Any]) -> History:
        """Return the observations that `packed` returned; metrics of an unknown name are left out.

        Raises
        ------
        KeyError, TypeError, ValueError
            For what it did not return.
        """
        history = cls()
        history.steps, history._windows = _unpack("q", data["steps"]), _unpack("q", data["windows"])
        length = len(history)
        present = np.zeros(length, dtype=np.uint64)
        for name, (values, given) in data["columns"].items():
            if name not in METRICS:
                continue
            bit = METRICS.index(name)
            column: array[float] = _unpack("d", values)
            has = np.ones(length, dtype=np.uint64) if given == "all" else np.array(_unpack("q", given), dtype=np.uint64)
            if len(column) != length or len(has) != length:
                raise ValueError(f"{name} has another length than the steps")
            present |= has << np.uint64(bit)
            history._columns[bit] = column
        history._present = array("Q", present.tobytes())
        steps = np.array(history.steps)
        if len(history._windows) != length or (length and (steps[0] < 0 or (np.diff(steps) <= 0).any())):
            raise ValueError("steps must grow, and each has a window")
        return history

    def extend(self, later: History) -> None:
        """Add observations that all are of later steps."""
        self._cut(len(self.steps))
        for bit, column in enumerate(later._columns):
            mine = self._columns[bit]
            if column is None and mine is None:
                continue
            if mine is None:
                self._columns[bit] = mine = _missing(len(self.steps))
            mine.extend(_missing(len(later)) if column is None else column)
        self._windows.extend(later._windows)
        self._present.extend(later._present)
        self.steps.extend(later.steps)

    def _cut(self, length: int) -> None:
        whole_numbers = (self.steps, self._windows, self._present)
        for column in whole_numbers:
            del column[length:]
        for values in self._columns:
            if values is not None:
                del values[length:]


def _missing(length: int) -> array[float]:
    return array("d", [math.nan]) * length


def _pack(values: array[Any]) -> str:
    """Return 8-byte numbers as text: byte by byte of all of them, which is what compresses well."""
    planes = np.frombuffer(values.tobytes(), dtype=np.uint8).reshape(-1, 8).T
    return base64.b64encode(zlib.compress(planes.tobytes())).decode()


def _unpack(kind: str, text: str) -> array[Any]:
    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    except zlib.error as error:
        raise ValueError(f"not a packed column: {error}") from error
    return array(kind, planes.reshape(8, -1).T.tobytes())
