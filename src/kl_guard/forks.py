"""What is to be done in a forked child, where what it inherited belongs to its parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_HERE: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def when_forked(owner: T, do: Callable[[T], None]) -> None:
    """Call `do(owner)` in each child that is forked while `owner` lives."""
    _HERE[owner] = do


def _in_the_child() -> None:
    for owner, do in list(_HERE.items()):
        do(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_the_child)
