"""What happened at the first few steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator


class First:
    """The values of the first `size` steps and their median; a step counts once, with its first word.

    Costs nothing any more once there are so many.

    Examples
    --------
    >>> first = First(3)
    >>> for step, value in [(1, 5.0), (2, 9.0), (2, 1.0), (3, 6.0), (4, 100.0)]:
    ...     first.update(step, value)
    >>> list(first), first.median, first.full, first.since
    ([5.0, 9.0, 6.0], 6.0, True, 1)
    """

    __slots__ = ("_pairs", "_size", "median")

    def __init__(self, size: int) -> None:
        self._size = size
        self._pairs: list[tuple[int, float]] = []
        self.median = math.nan

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[float]:
        return (value for _, value in self._pairs)

    @property
    def full(self) -> bool:
        """Whether there are as many steps as it keeps."""
        return len(self._pairs) == self._size

    @property
    def since(self) -> int | None:
        """The first of the steps."""
        return self._pairs[0][0] if self._pairs else None

    def update(self, step: int, value: float) -> None:
        """Add the value of a step."""
        if not self.full and (not self._pairs or step > self._pairs[-1][0]):
            self._pairs.append((step, value))
            self.median = statistics.median(self)

    def reset(self) -> None:
        """Forget everything."""
        self._pairs, self.median = [], math.nan

    def state_dict(self) -> list[list[float]]:
        """Return the state as JSON-ready values."""
        return [[step, value] for step, value in self._pairs]

    def load_state_dict(self, state: Iterable[Iterable[float]]) -> None:
        """Take over a state that `state_dict` returned."""
        self.reset()
        for step, value in state:
            self.update(int(step), float(value))
