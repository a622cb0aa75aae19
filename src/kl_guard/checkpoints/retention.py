"""Which pins are worth their space."""

from __future__ import annotations

from collections.abc import Iterable

NEWEST = 2


def wanted(calm: Iterable[int], now: int) -> set[int]:
    """Return the steps whose pins are to be kept at step `now`: five at most.

    Kept are the two newest; one aged a quarter to a half of the run, since a slow start of trouble is noticed late; the
    one that will take its place when it has become too old; and the oldest, for trouble that was there all along.
    Without one of that age the oldest younger one stands in.

    Parameters
    ----------
    calm:
        Steps of the pins there are.
    now:
        The step that the run has reached.

    Examples
    --------
    >>> sorted(wanted(range(10, 110, 10), now=100))
    [10, 50, 70, 90, 100]
    """
    steps = sorted(set(calm))
    keep = {*steps[:1], *steps[-NEWEST:]}
    aged = [step for step in steps if now / 4 <= now - step <= now / 2]
    younger = [step for step in steps if now - step < now / 4]
    if aged:
        keep.add(aged[0])  # the oldest of that age
        # Its heir must have reached a quarter of the run when this one passes the half, at step 2 * aged[0].
        keep.update([step for step in steps if aged[0] < step <= 1.5 * aged[0]][-1:])
    elif younger:
        keep.add(younger[0])
    return keep
