"""Callbacks that do not keep alive the object they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T], otherwise: T) -> Callable[P, T]:
    """Return a function that calls a bound method as long as its object is there, and then gives `otherwise`.

    An object whose parts hold its own methods is freed by the garbage collector only, late where it is old and large.

    Examples
    --------
    >>> class Counter:
    ...     def count(self) -> int:
    ...         return 1
    >>> counter = Counter()
    >>> count = weakly(counter.count, 0)
    >>> with_counter = count()
    >>> del counter
    >>> with_counter, count()
    (1, 0)
    """
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = reference()
        return otherwise if alive is None else alive(*args, **kwargs)

    return call
