"""Everything observed in a run, in a few bytes per step."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter

from kl_guard.observation import METRICS, Observation

_values = attrgetter(*METRICS)


class History:
    """The observations of the run so far, in order of steps; about 190 bytes each.

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
        self._present = array("L")  # bit i: METRICS[i] was given, so that NaN and missing stay apart
        self._columns = [array("d") for _ in METRICS]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Observation:
        present = self._present[index]
        values = {name: self._columns[bit][index] for bit, name in enumerate(METRICS) if present >> bit & 1}
        return Observation(self.steps[index], window=self._windows[index], **values)

    def __iter__(self) -> Iterator[Observation]:
        return (self[i] for i in range(len(self)))

    def append(self, observation: Observation) -> None:
        """Add an observation of a later step."""
        self.steps.append(observation.step)
        self._windows.append(observation.window)
        present = 0
        for bit, (value, column) in enumerate(zip(_values(observation), self._columns, strict=True)):
            if value is None:
                column.append(math.nan)
            else:
                present |= 1 << bit
                column.append(value)
        self._present.append(present)

    def replace_last(self, observation: Observation) -> None:
        """Put an observation of the same step, with more known, in place of the last one."""
        self._cut(len(self.steps) - 1)
        self.append(observation)

    def column(self, name: str) -> array[float]:
        """Return one metric of all observations; NaN where it is missing."""
        return self._columns[METRICS.index(name)]

    def index(self, step: int) -> int:
        """Return the index of the first observation at `step` or later."""
        return bisect_left(self.steps, step)

    def truncate(self, step: int) -> None:
        """Forget what came after `step`."""
        self._cut(bisect_right(self.steps, step))

    def _cut(self, length: int) -> None:
        whole_numbers = (self.steps, self._windows, self._present)
        for column in whole_numbers:
            del column[length:]
        for values in self._columns:
            del values[length:]
