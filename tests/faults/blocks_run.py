"""A run in miniature whose files are made shorter all the time, killed at some place.

`python blocks_run.py FOLDER WHERE`: `write`, `fsync`, `before rename`, `after rename` of a draft, or so many seconds
after its first step; `go on` resumes it, and ends. Says on standard output up to which step all was written.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from kl_guard import KLGuard, blocks, shortening, thinned_tokens
from some_tokens import stats

BEGUN = threading.Event()


def main() -> None:
    """Go through the run."""
    folder, where = Path(sys.argv[1]), sys.argv[2]
    shortening.EVERY = 1 << 14
    blocks.KEEP, blocks.SIZE, blocks.WORTH, blocks.FEWEST = 20, 40, 0, 3
    thinned_tokens.RECENT, thinned_tokens.EVENLY, thinned_tokens.LARGEST = 20, 10, 5
    guard = KLGuard(output_dir=folder, announce=False)
    first = 1
    if where == "go on":
        guard.resumed(2**53)
        first = len(guard.history) + 1
    else:
        be_killed(where)
    for step in range(first, first + 300 if where == "go on" else 10**6):
        guard.observe(step, tokens=stats(0.02), reward=step / 7)
        if where != "go on":
            os.write(1, b"%d\n" % step)
            BEGUN.set()
    guard.close()
    print(len(guard.history))


def be_killed(where: str) -> None:
    """Arrange for the end."""
    if where == "write":
        whole = shortening.lines_of

        def lines_of(path: Path, upto: int) -> Iterator[bytes]:
            for i, line in enumerate(whole(path, upto)):
                yield line
                if i == 60 and upto > 1 << 16:
                    kill()

        blocks.lines_of = lines_of
    elif where == "fsync":
        fsync, count = os.fsync, [0]

        def fsync_(file: int) -> None:
            count[0] += threading.current_thread() is not threading.main_thread()
            if count[0] == 3:
                kill()
            fsync(file)

        os.fsync = fsync_
    elif where.endswith("rename"):
        replace, renames = Path.replace, [0]

        def replace_(self: Path, target: Path) -> Path:
            renames[0] += 1
            if renames[0] == 4 and where == "before rename":
                kill()
            moved = replace(self, target)
            if renames[0] == 4:
                kill()
            return moved

        Path.replace = replace_
    else:
        threading.Thread(target=lambda: (BEGUN.wait(), time.sleep(float(where)), kill()), daemon=True).start()


def kill() -> None:
    """As the system does it when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
