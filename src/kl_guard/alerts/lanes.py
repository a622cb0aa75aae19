"""Work done by daemon threads of this process, a lane for each name: one that hangs does not hold up the others."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue

Work = Callable[[], None]

MOST = 16  # pieces of work that may wait in one lane
SECONDS = 10.0  # at the end, for everything together


class Lanes:
    """Threads, started when first needed, each with a queue.

    What is still to be done when the process ends is waited for, but no longer than `SECONDS`.

    Parameters
    ----------
    complain:
        Called with a lane and what went wrong in it.
    """

    def __init__(self, complain: Callable[[str, str], None]) -> None:
        self.pid = os.getpid()  # a forked process has the object, but neither its threads nor, maybe, its lock
        self._complain = complain
        self._changed = threading.Condition()
        self._queues: dict[str, SimpleQueue[Work | None]] = {}
        self._waiting: dict[str, int] = {}
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._waiting})"

    def submit(self, name: str, work: Work) -> None:
        """Let a piece of work be done in a lane, after what waits there; never waits itself."""
        with self._changed:
            full = self._waiting.get(name, 0) >= MOST
            if not full:
                if name not in self._queues:
                    self._open(name)
                self._waiting[name] = self._waiting.get(name, 0) + 1
                self._queues[name].put(work)
        if full:
            self._complain(name, f"{MOST} alerts wait for it already, so further ones are dropped")

    def wait(self, seconds: float, names: Collection[str] | None = None) -> list[str]:
        """Wait until the lanes named (all where None) are empty; return those that are not after `seconds`."""

        def busy() -> list[str]:
            return [name for name, count in self._waiting.items() if count and (names is None or name in names)]

        with self._changed:
            self._changed.wait_for(lambda: not busy(), seconds)
            return busy()

    def close(self, seconds: float | None = None) -> None:
        """Wait for what is to be done, and end the threads; one that hangs is left to itself."""
        atexit.unregister(self.close)
        if self.pid != os.getpid():
            return
        seconds = SECONDS if seconds is None else seconds
        late = self.wait(seconds)
        with self._changed:
            for queue in self._queues.values():
                queue.put(None)
            self._queues, self._waiting = {}, {}
        for name in late:
            self._complain(name, f"no answer within {seconds:g} s")

    def _open(self, name: str) -> None:
        queue: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._do, args=(name, queue), name=f"kl-guard alerts: {name}", daemon=True).start()
        self._queues[name] = queue

    def _do(self, name: str, queue: SimpleQueue[Work | None]) -> None:
        while (work := queue.get()) is not None:
            try:
                work()
            finally:
                with self._changed:
                    if self._waiting.get(name):
                        self._waiting[name] -= 1
                    self._changed.notify_all()
