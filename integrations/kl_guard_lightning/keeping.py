"""The states that are kept: the guard learns of each checkpoint, and the start and a halt are saved for it."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from kl_guard import GuardConfig, KLGuard
from kl_guard.paths import unused
from kl_guard_lightning import internals, optimizers
from kl_guard_lightning.limits import is_resumable
from kl_guard_lightning.saves import Saves, is_whole
from kl_guard_lightning.way_back import WayBack
from kl_guard_torch.faults import Faults
from kl_guard_torch.room import why_no_room

logger = logging.getLogger("kl_guard")


class Keeping:
    """Tells the guard of checkpoints, and saves the state at the start and at a halt. All on all ranks.

    Parameters
    ----------
    config:
        The knobs.
    faults:
        Keeps faults of the guard inside.

    Attributes
    ----------
    saves:
        What the trainer has saved.
    mid_step:
        Whether the last batch has left gradients that no checkpoint holds.
    """

    def __init__(self, config: GuardConfig, faults: Faults) -> None:
        self.saves = Saves(faults, self.note_saved)
        self.mid_step = False
        self._config = config
        self._faults = faults
        self._trainer: Any = None
        self._guard: KLGuard | None = None
        self._way: WayBack | None = None
        self._noted: tuple[int, int] | None = None
        self._unfinished: list[tuple[int, Path, dict[str, Any], bool]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.saves!r})"

    def watch(self, trainer: Any) -> None:
        """Begin to look at what is saved."""
        self._trainer = trainer
        self.saves.watch(trainer)

    def begin(self, guard: KLGuard | None, way: WayBack | None, step: int) -> None:
        """Begin an attempt, or a run, at a step.

        With accumulation Lightning saves the step that it has resumed from again, in the middle of the next one. That
        is no checkpoint, and must not take the place of the one that it has resumed from.
        """
        self._guard, self._way = guard, way
        self.mid_step = False
        self._unfinished = []
        self._noted = (step, self._attempt)

    def note_saved(self, path: Path) -> None:
        """Tell the guard of a checkpoint that was saved: of the first one of a step."""
        step = int(self._trainer.global_step)
        key = (step, self._attempt)
        if step == 0 or any(self._faults.shared(self._noted == key)):
            return
        self._noted = key
        facts = self._of_all(self._facts())
        if all(self._faults.shared(is_whole(path))):
            self._tell(step, path, facts, exact=self._is_exact())
        else:  # written in the background
            self._unfinished.append((step, path, facts, self._is_exact()))

    def note_finished(self) -> None:
        """Tell the guard of checkpoints that have been written in the background since; on each rank by itself."""
        for one in [one for one in self._unfinished if is_whole(one[1])]:
            self._unfinished.remove(one)
            step, path, facts, exact = one
            if self.saves.written.get(path) == step:
                self._tell(step, path, facts, exact=exact)

    def keep_start(self) -> None:
        """Pin the state before the first step, where the guard may have to go back that far."""
        way, guard, trainer = self._way, self._guard, self._trainer
        wanted = self._config.pin_start and self._config.pin_checkpoints
        if way is None or not way.ready or not wanted or trainer.ckpt_path is not None or trainer.global_step > 0:
            return
        folder = None if guard is None else guard.folder
        place = self._place_for(folder, "start", "the state at the start is not kept, so the first checkpoint is")
        if place is not None and self._save(place, "start.ckpt"):
            self._tell(0, place, self._of_all(self._facts()), exact=True, take=True)

    def keep_halted(self, root: Path | None) -> None:
        """Save the state at a halt beside the run's checkpoints."""
        if not self._config.save_halted:
            return
        step = int(self._trainer.global_step)
        folder = None if root is None else root / "kl_guard" / "halted"
        place = self._place_for(folder, f"step-{step}", "the halted state is not kept")
        if place is not None and self._save(place, f"step={step}.ckpt") and self._trainer.is_global_zero:
            logger.warning("kl-guard: the halted state is in %s", place)

    def finish(self) -> None:
        """Stop looking."""
        self.note_finished()
        self.saves.leave()

    @property
    def _attempt(self) -> int:
        return 0 if self._guard is None else self._guard.attempt

    def _tell(self, step: int, path: Path, facts: dict[str, Any], *, exact: bool, take: bool = False) -> None:
        if self._guard is not None:
            note = functools.partial(self._guard.checkpoint_saved, aligned=exact, facts=facts, take=take)
            self._faults.guarded(note, step, path)

    def _is_exact(self) -> bool:
        """Return whether a resume from here is exact: between two steps, with data that keep their place there."""
        keeps_its_place = self._faults.guarded(is_resumable, self._trainer) or internals.ends_epoch(self._trainer)
        return not self.mid_step and keeps_its_place

    def _facts(self) -> dict[str, Any]:
        """Return what a restored state is compared with, where the guard may go back to it."""
        if self._way is None or not self._way.ready:
            return {}
        return self._faults.guarded(optimizers.facts, self._trainer, self._trainer.lightning_module) or {}

    def _of_all(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return what ranks know of a saved state, put together; {} where one of them does not."""
        everywhere = self._faults.shared(facts)
        if not all(everywhere):
            return {}
        return {**everywhere[0], "weights": [one["weights"] for one in everywhere]}

    def _place_for(self, folder: Path | None, name: str, otherwise: str) -> Path | None:
        """Return a new folder in `folder`, the same on all ranks; None, and why is said, where there is no room."""
        module = self._trainer.lightning_module
        why = "there is no output folder" if folder is None else self._faults.guarded(why_no_room, folder, module)
        obstacles = [text for text in self._faults.shared(why) if text != ""]
        place = None if folder is None else self._faults.guarded(unused, folder / name)
        place = self._faults.shared(place)[0]
        if obstacles or place is None:
            if self._trainer.is_global_zero:
                logger.warning("kl-guard: %s: %s", otherwise, next(iter(obstacles), None) or "a fault of the guard")
            return None
        return place

    def _save(self, place: Path, name: str) -> bool:
        """Save the state of training in a folder; return whether it is there on every rank."""
        if self._trainer.is_global_zero:
            self._faults.guarded(functools.partial(place.mkdir, parents=True, exist_ok=True))
        self._faults.guarded(self.saves.unseen, place / name)
        return all(self._faults.shared(is_whole(place / name)))
