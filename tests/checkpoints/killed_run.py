"""A run in miniature, to be killed at any moment: it saves, rotates, blows up twice, is taken back, and resumes itself.

`python killed_run.py FOLDER`: goes on from the newest complete checkpoint in FOLDER, as `resume_from_checkpoint=True`
does. What it saved and what its own rotation deleted is written to FOLDER/trainer.log, a line for each.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from pathlib import Path

from kl_guard import GuardConfig, KLGuard
from kl_guard.checkpoints import pins

STEPS, EVERY = 80, 5
TROUBLE = {0: 32, 1: 47}  # by attempt: the step from which on KL grows
LARGE = 1 << 14

pins.SMALL = LARGE


def complete(folder: Path) -> dict[int, Path]:
    """The checkpoints that were saved to the end, by step."""
    names = {int(p.name.split("-")[1]): p for p in folder.glob("checkpoint-*")}
    return {step: path for step, path in names.items() if (path / "id").is_file()}


class Trainer:
    """Saves in place and keeps the newest only, like a trainer with `save_total_limit=1`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = os.open(folder / "trainer.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of a step goes."""
        return self.folder / f"checkpoint-{step}"

    def save(self, step: int) -> Path:
        """Write a checkpoint, the largest file in place of what was there, the mark of completeness last."""
        path, name = self.folder_of(step), uuid.uuid4().hex
        if (path / "id").is_file():
            raise RuntimeError(f"{path} would be written over")
        path.mkdir(exist_ok=True)
        (path / "optimizer.pt").write_bytes(name.encode() * (2 * LARGE // 32))
        (path / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        self.log(f"saving {step} {name}")
        (path / "id.draft").write_text(name)
        (path / "id.draft").rename(path / "id")
        self.log(f"saved {step} {name}")
        for old in sorted(complete(self.folder))[:-1]:
            self.log(f"rotated {old} {(self.folder_of(old) / 'id').read_text()}")
            shutil.rmtree(self.folder_of(old))
        return path

    def log(self, line: str) -> None:
        """Note it, before or after it is done."""
        os.write(self._log, f"{line}\n".encode())


def main() -> None:
    """Go on until the end or the kill."""
    folder = Path(sys.argv[1])
    trainer = Trainer(folder)
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=folder, announce=False)
    step = 0
    if guard.recover():
        step = back(guard, trainer)
    elif there := complete(folder):
        step = max(there)
        guard.resumed(step, present=there)
    print("begun", flush=True)
    while step < STEPS:
        step += 1
        start = TROUBLE.get(guard.attempt, STEPS + 1)
        decision = guard.observe(step, 0.02 * 1.6 ** max(0, step - start))
        if decision.action == "rollback":
            step = back(guard, trainer)
        elif decision.action == "halt":
            trainer.log(f"halted {step} {decision.note}")
            return
        elif step % EVERY == 0:
            guard.checkpoint_saved(step, trainer.save(step))
            if step == 2 * EVERY:  # from here on there must always be a way back
                guard.checkpoints.wait()
                trainer.log(f"pinned {step}")
    guard.close()
    trainer.log(f"finished {guard.attempt}")


def back(guard: KLGuard, trainer: Trainer) -> int:
    """Go back as the guard says."""
    target = guard.go_back(trainer.folder_of, complete(trainer.folder))
    if target is None:
        trainer.log("halted no target")
        sys.exit(0)
    guard.rolled_back(target.step)
    trainer.log(f"back {target.step} {guard.attempt}")
    return target.step


if __name__ == "__main__":
    main()
