"""A running sum without rounding error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


class ExactSum:
    """The exact sum of the numbers added and not yet taken away, in a handful of floats.

    A plain running sum drifts: after 1e9 has come and gone, a sum of values near 1e-3 is off by 1e-7. Here the sum is
    kept as non-overlapping partial sums (Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997, the method
    behind `math.fsum`), so adding `x` and later `-x` leaves exactly what was there before. O(number of partials),
    two to four in practice.

    Examples
    --------
    >>> total = ExactSum([1e-3])
    >>> total.add(1e16); total.add(-1e16)
    >>> total.value
    0.001
    """

    __slots__ = ("_partials",)

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._partials: list[float] = []
        self.assign(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return math.fsum(self._partials)

    def add(self, x: float) -> None:
        """Add one finite number; `add(-x)` takes it away again."""
        partials = self._partials
        kept = 0
        for y in partials:
            if abs(x) < abs(y):
                x, y = y, x
            high = x + y
            low = y - (high - x)
            if low:
                partials[kept] = low
                kept += 1
            x = high
        partials[kept:] = [x] if x else []

    def assign(self, values: Iterable[float]) -> None:
        """Become the sum of `values`."""
        rest = list(values)
        partials: list[float] = []  # fsum rounds once; what that left is summed again, until nothing is left
        while part := math.fsum(rest):
            partials.append(part)
            rest.append(-part)
        self._partials = partials[::-1]

    def reset(self) -> None:
        """Become zero."""
        self._partials = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-ready values."""
        return {"partials": list(self._partials)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self._partials = [float(part) for part in state["partials"]]
