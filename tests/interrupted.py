"""Ctrl-C in the middle of the guard's own work: in the n-th call of one of its functions, wherever that is."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

import kl_guard
import kl_guard_torch
from kl_guard import KLGuard
from kl_guard.journal import read_journal
from kl_guard.memory import recall

SOURCES = str(Path(kl_guard.__file__).parent), str(Path(kl_guard_torch.__file__).parent.parent)


class Interrupt:
    """Counts the calls of the guard's own functions by this thread while it is `on`, and raises `error` in one.

    Where the exception is raised it stands as one that a signal handler has raised: at the beginning of that call.

    Parameters
    ----------
    at:
        In which call, from 1; None to count only.
    error:
        What is raised.
    lines:
        Whether lines count in the place of calls, which takes longer.
    """

    def __init__(self, at=None, error=KeyboardInterrupt, *, lines=False):
        self.at, self.error, self.lines = at, error, lines
        self.calls = 0
        self.raised_in = ""

    @contextmanager
    def on(self):
        """Count and raise in what is done within."""
        start, before = (sys.settrace, sys.gettrace()) if self.lines else (sys.setprofile, sys.getprofile())
        start(self._look)
        try:
            yield
        finally:
            start(before)

    def within(self, work, nth):
        """Return what does `work` as ever, and counts and raises while it does so for the `nth` time."""
        times = [0]

        def call(*args, **kwargs):
            times[0] += 1
            if times[0] != nth:
                return work(*args, **kwargs)
            with self.on():
                return work(*args, **kwargs)

        return call

    def _look(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(SOURCES):
            return None
        if event == ("line" if self.lines else "call"):
            self.calls += 1
            if self.calls == self.at:
                self.raised_in = f"{code.co_name}, line {frame.f_lineno}"
                raise self.error
        return self._look


class Observed:
    """Notes the steps whose observation the guard has taken in completely."""

    def __init__(self, monkeypatch):
        self.steps = []
        observe = KLGuard.observe

        def observe_(guard, step, *args, **kwargs):
            decision = observe(guard, step, *args, **kwargs)
            self.steps.append(step)
            return decision

        monkeypatch.setattr(KLGuard, "observe", observe_)


def journal_of(output_dir):
    """The journal of a run."""
    return Path(output_dir) / "kl_guard" / "journal.jsonl"


def memory_of(output_dir):
    """What a journal adds up to; each of its lines must be whole."""
    if not journal_of(output_dir).exists():
        return recall([])
    records, notes = read_journal(journal_of(output_dir))
    memory = recall(records)
    assert not notes
    assert memory.unreadable == 0
    return memory


def written(output_dir):
    """The steps of all observations that a journal has, also of those that a run has left behind."""
    if not journal_of(output_dir).exists():
        return set()
    return {record["step"] for record in read_journal(journal_of(output_dir))[0] if record["type"] == "observation"}


def is_free(output_dir):
    """Whether nobody holds the folder."""
    if not (Path(output_dir) / "kl_guard").is_dir():
        return True
    lock = FileLock(Path(output_dir) / "kl_guard" / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    return True


EARLIER = weakref.WeakSet()  # threads that tests before this one have left


def at_work():
    """The threads of the guard that this test has begun and that are still there."""
    threads = [thread for thread in threading.enumerate() if thread not in EARLIER]
    return [thread.name for thread in threads if thread.name.startswith("kl-guard")]
