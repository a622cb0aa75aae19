"""The growing series that every window looks at."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import Any

LARGEST = 1e300  # a sum of 1e8 such values still is a finite float


class Series:
    """An append-only array of finite numbers, 8 bytes each, that can be cut back to a shorter length.

    Windows hold a reference to one series and read `values` directly; `version` changes whenever numbers that a
    window may have read are taken away, so that it knows to start over.

    Raises
    ------
    ValueError
        From `append`, for NaN and infinities: they are judged before they get here.

    Examples
    --------
    >>> series = Series([1.0, 2.0, 3.0])
    >>> series.truncate(2)
    >>> series.append(5)
    >>> list(series.values)
    [1.0, 2.0, 5.0]
    """

    __slots__ = ("values", "version")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values = array("d")
        self.version = 0
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{len(self.values)} values>)"

    def append(self, value: float) -> None:
        """Add one finite number, O(1). Beyond +-1e300 it is clipped, so that no sum overflows."""
        value = float(value)
        if not math.isfinite(value):
            raise ValueError(f"a series holds finite numbers only, got {value!r}")
        self.values.append(min(max(value, -LARGEST), LARGEST))

    def truncate(self, length: int) -> None:
        """Keep the first `length` numbers."""
        if length < len(self.values):
            del self.values[length:]
            self.version += 1

    def reset(self) -> None:
        """Forget everything."""
        self.truncate(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-ready values."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self.reset()
        for value in state["values"]:
            self.append(value)
