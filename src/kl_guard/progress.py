"""Long work, shown to who waits for it: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

PATIENCE = 0.5  # seconds of work that nobody needs a bar for
EVERY = 0.1  # seconds from one picture to the next
NARROW = 30  # columns that bar, percent and time take

Told = Callable[[float], None]
"""Is told which share of the work is done, from 0 to 1."""

Shown = Callable[[str], AbstractContextManager[Told]]
"""Shows a piece of work, by its name, while it is done."""


def unseen(what: str) -> AbstractContextManager[Told]:
    """Show nothing."""
    return nullcontext(_nothing)


def on_terminal(what: str) -> AbstractContextManager[Told]:
    """Show a bar on standard error where that is a terminal; it comes after half a second and goes at the end."""
    return _Bar(what) if _is_terminal() else unseen(what)


def for_rank(rank: int) -> Shown:
    """Return what shows the work of a process: of one only."""
    return on_terminal if rank == 0 else unseen


def counted(told: Told, total: int) -> Callable[[int], None]:
    """Return what is told how many bytes more were read, of so many."""
    if told is _nothing:
        return _nothing
    read = 0

    def more(count: int) -> None:
        nonlocal read
        read += count
        told(min(1.0, read / max(1, total)))

    return more


def _nothing(_: float) -> None:
    pass


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # there is no standard error, or it is closed
        return False


class _Bar:
    """A bar; what a terminal refuses costs the bar, never the work."""

    def __init__(self, what: str) -> None:
        self._what = "".join(c if c.isprintable() else "?" for c in what)
        self._next = time.monotonic() + PATIENCE
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Told:
        return self._to

    def __exit__(self, *_: object) -> None:
        self._next = float("inf")
        try:
            if self._progress is not None:
                self._progress.stop()
        except Exception:
            self._progress = None

    def _to(self, share: float) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        try:
            if self._progress is None:
                self._begin()
            self._progress.update(self._task, completed=share, refresh=True)
        except Exception:
            self._next = float("inf")

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        class Quiet(Console):
            """Leaves the cursor as it is: a process that is killed would leave the terminal without."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        console = Quiet(stderr=True)
        room = max(8, console.width - NARROW)
        what = self._what if len(self._what) <= room else f"{self._what[: room - 3]}..."
        print("\r\x1b[2K", end="", file=sys.stderr)  # a trainer's bar may stand on this line; it comes again
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            auto_refresh=False,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(what, total=1.0)
        self._progress.start()
