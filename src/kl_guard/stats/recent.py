"""What happened at the last few steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class Recent:
    """The values of the last `size` steps, in order; a step may be told more than once, and its last word counts.

    Examples
    --------
    >>> recent = Recent(3)
    >>> for step, value in [(1, 5.0), (2, 6.0), (2, 7.0), (3, 8.0), (4, 9.0)]:
    ...     recent.update(step, value)
    >>> list(recent)
    [7.0, 8.0, 9.0]
    """

    __slots__ = ("_pairs",)

    def __init__(self, size: int) -> None:
        self._pairs: deque[tuple[int, float]] = deque(maxlen=size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[float]:
        return (value for _, value in self._pairs)

    @property
    def full(self) -> bool:
        """Whether there are as many steps as it keeps."""
        return len(self._pairs) == self._pairs.maxlen

    def update(self, step: int, value: float) -> None:
        """Add the value of a step."""
        if self._pairs and self._pairs[-1][0] == step:
            self._pairs[-1] = (step, value)
        else:
            self._pairs.append((step, value))

    def reset(self) -> None:
        """Forget everything."""
        self._pairs.clear()

    def state_dict(self) -> list[list[float]]:
        """Return the state as JSON-ready values."""
        return [[step, value] for step, value in self._pairs]

    def load_state_dict(self, state: Iterable[Iterable[float]]) -> None:
        """Take over a state that `state_dict` returned."""
        self._pairs.clear()
        self._pairs.extend((int(step), float(value)) for step, value in state)
