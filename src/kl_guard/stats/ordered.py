"""Numbers kept in order, 8 bytes each."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

LOAD = 1000  # numbers in a chunk, up to twice as many


class Ordered:
    """A sorted list of floats, in chunks of plain doubles; all that changes or looks it up is O(log n) amortised.

    A list of float objects takes 32 bytes a number and more. Numbers of chunk i are at most `_bounds[i]`, those of the
    chunks behind it at least that; a Fenwick tree over the lengths tells how many stand before a chunk.

    Examples
    --------
    >>> ordered = Ordered([3.0, 1.0, 2.0, 2.0])
    >>> ordered.add(5.0)
    >>> ordered.remove(1.0)
    >>> list(ordered), ordered[2], ordered.left(2.0), ordered.right(2.0)
    ([2.0, 2.0, 3.0, 5.0], 3.0, 0, 2)
    """

    __slots__ = ("_bounds", "_chunks", "_length", "_tree")

    def __init__(self, values: Iterable[float] = ()) -> None:
        ordered = array("d", sorted(values))
        self._length = len(ordered)
        self._chunks = [ordered[i : i + LOAD] for i in range(0, len(ordered), LOAD)] or [ordered]
        self._index([chunk[-1] for chunk in self._chunks[:-1]])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[float]:
        for chunk in self._chunks:
            yield from chunk

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{self._length} values>)"

    def __getitem__(self, position: int) -> float:
        if not 0 <= position < self._length:
            raise IndexError(f"no position {position} among {self._length} numbers")
        tree, at = self._tree, 0
        step = 1 << (len(tree) - 1).bit_length()
        while step := step >> 1:
            if at + step < len(tree) and tree[at + step] <= position:
                at += step
                position -= tree[at]
        return self._chunks[at][position]

    def left(self, value: float) -> int:
        """Return how many numbers are smaller than `value`."""
        at = bisect_left(self._bounds, value)
        return self._before(at) + bisect_left(self._chunks[at], value)

    def right(self, value: float) -> int:
        """Return how many numbers are at most `value`."""
        at = bisect_right(self._bounds, value)
        return self._before(at) + bisect_right(self._chunks[at], value)

    def add(self, value: float) -> None:
        """Put a number in its place."""
        at = bisect_left(self._bounds, value)
        chunk = self._chunks[at]
        chunk.insert(bisect_left(chunk, value), value)
        self._count(at, 1)
        if len(chunk) > 2 * LOAD:
            self._chunks[at : at + 1] = chunk[:LOAD], chunk[LOAD:]
            self._index([*self._bounds[:at], chunk[LOAD - 1], *self._bounds[at:]])

    def remove(self, value: float) -> None:
        """Take a number away.

        Raises
        ------
        ValueError
            If it is not there.
        """
        at = bisect_left(self._bounds, value)
        place = bisect_left(self._chunks[at], value)
        while place == len(self._chunks[at]) and at + 1 < len(self._chunks):  # equal to its bound, and behind it
            at += 1
            place = bisect_left(self._chunks[at], value)
        chunk = self._chunks[at]
        if place == len(chunk) or chunk[place] != value:
            raise ValueError(f"{value!r} is not there")
        del chunk[place]
        self._count(at, -1)
        if len(chunk) < LOAD // 4 and len(self._chunks) > 1:
            first = max(0, at - 1)
            self._chunks[first : first + 2] = [self._chunks[first] + self._chunks[first + 1]]
            self._index([*self._bounds[:first], *self._bounds[first + 1 :]])

    def _index(self, bounds: list[float]) -> None:
        self._bounds = bounds
        tree = [0, *map(len, self._chunks)]
        for i in range(1, len(tree)):
            above = i + (i & -i)
            if above < len(tree):
                tree[above] += tree[i]
        self._tree = tree

    def _before(self, at: int) -> int:
        """Return how many numbers stand before chunk `at`."""
        tree, total = self._tree, 0
        while at:
            total += tree[at]
            at &= at - 1
        return total

    def _count(self, at: int, change: int) -> None:
        self._length += change
        tree, at = self._tree, at + 1
        while at < len(tree):
            tree[at] += change
            at += at & -at
