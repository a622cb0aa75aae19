"""Which pins are worth their space."""

from __future__ import annotations

from collections.abc import Collection, Iterable

NEWEST = 2


def wanted(calm: Iterable[int], now: int, *, trusted: int | None = None, also: Collection[int] = ()) -> set[int]:
    """Return the steps whose pins are to be kept at step `now`: four at most, besides `trusted` and `also`.

    Kept are the two newest calm ones; one aged a quarter to a half of the run, since a slow start of trouble is noticed
    late; and the one that will take its place when it has become too old. Without one of that age the oldest younger
    one stands in.

    Parameters
    ----------
    calm:
        Steps of the pins that were calm when saved.
    now:
        The step that the run has reached.
    trusted:
        While a suspicion stands: the last step before it. The newest calm pin up to there is kept, however old.
    also:
        Steps to keep whatever their age, such as the state at the start.

    Examples
    --------
    >>> sorted(wanted(range(10, 110, 10), now=100))
    [50, 70, 90, 100]
    >>> sorted(wanted([10, 80, 90, 100], now=400, trusted=10))
    [10, 90, 100]
    """
    steps = sorted(set(calm))
    keep = set(also) | set(steps[-NEWEST:])
    if trusted is not None:
        keep.update([step for step in steps if step <= trusted][-1:])
    aged = [step for step in steps if now / 4 <= now - step <= now / 2]
    younger = [step for step in steps if now - step < now / 4]
    if aged:
        keep.add(aged[0])  # the oldest of that age
        # Its heir must have reached a quarter of the run when this one passes the half, at step 2 * aged[0].
        keep.update([step for step in steps if aged[0] < step <= 1.5 * aged[0]][-1:])
    elif younger:
        keep.add(younger[0])
    return keep
