"""A run in miniature on a disk that gets full, and then has room again; says on standard output what came of it.

`python full_disk_run.py FOLDER fill` fills the file system that FOLDER is on; `... limit` lets no file grow instead.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from kl_guard import GuardConfig, KLGuard
from some_tokens import stats

FULL_FROM, ROOM_FROM, TROUBLE, END = 40, 120, 90, 160
ROOM_LEFT = 20_000


def main() -> None:
    """Go through the run."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("kl_guard").addHandler(handler)
    guard = KLGuard(GuardConfig(action="halt"), output_dir=folder)
    twin = KLGuard(GuardConfig(action="halt"), announce=False)
    halted, expected, present = None, None, 0
    for step in range(1, END + 1):
        if step == FULL_FROM:
            fill(folder, how)
            present = (folder / "kl_guard" / "journal.jsonl").stat().st_size
        if step == ROOM_FROM:
            make_room(folder, how)
        kl = 0.02 * 1.6 ** min(20, max(0, step - TROUBLE))
        decision = guard.observe(step, tokens=stats(kl), reward=1.0)
        if twin.observe(step, tokens=stats(kl), reward=1.0) and expected is None:
            expected = step
        if decision and halted is None:
            halted = step
        if step % 20 == 0:
            checkpoint = folder.parent / f"checkpoint-{step}"
            checkpoint.mkdir()
            (checkpoint / "weights").write_bytes(b"w" * 10_000)
            guard.checkpoint_saved(step, checkpoint)
            guard.checkpoints.wait()
    guard.close()
    print(json.dumps({"halted": halted, "expected": expected, "blind": guard.blind, "said": said, "present": present}))


def fill(folder: Path, how: str) -> None:
    """Leave no more than a few lines' room."""
    if how == "limit":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_LEFT, resource.RLIM_INFINITY))
        return
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (4096, 512, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                pass


def make_room(folder: Path, how: str) -> None:
    """Let files grow again."""
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        (folder / "filler").unlink()


if __name__ == "__main__":
    main()
