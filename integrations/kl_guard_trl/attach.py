"""`train()` that goes back: one call by the user, as many runs of the trainer's own loop as it takes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import TrainOutput

from kl_guard import Checkpoint, KLGuard
from kl_guard_torch import ranks
from kl_guard_torch.facts import RestoreFailed
from kl_guard_torch.faults import Faults
from kl_guard_trl.way_back import WayBack, checkpoints_in

if TYPE_CHECKING:
    from kl_guard_trl.callback import KLGuardCallback

logger = logging.getLogger("kl_guard")


class Reentry:
    """Puts itself in the place of a trainer's `train`, and of the event that ends a run.

    When the guard stops a run to go back, `train` prepares the way and calls the trainer's own `train` again with the
    checkpoint. In between only the guard sees `on_train_end`, since trackers close their runs on it.

    Parameters
    ----------
    callback:
        The guard's callback, which stops the run and says why.
    way:
        The way back of the trainer.
    faults:
        Keeps faults of the guard inside.

    Attributes
    ----------
    goes_back:
        Whether the run that is stopping, or has just stopped, is to be taken back.
    returning:
        Whether the run under way was sent to its checkpoint by the guard.
    """

    def __init__(self, callback: KLGuardCallback, way: WayBack, faults: Faults) -> None:
        self.way = way
        self.goes_back = False
        self.returning = False
        self._callback = callback
        self._faults = faults
        self._begun = self._running = False
        self._train: Callable[..., Any] = way.trainer.train
        self._end: Callable[..., Any] = way.trainer.callback_handler.on_train_end
        way.trainer.train = _in_place_of(self._train, self.train)
        way.trainer.callback_handler.on_train_end = _in_place_of(self._end, self.on_train_end)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, going back as often as the guard asks for it and its budget allows.

        Raises
        ------
        RuntimeError
            When it is called from within itself, by `on_rollback` or another callback.
        """
        if self._running:
            raise RuntimeError("trainer.train() was called while it is running")
        self._running = True
        try:
            return self._train_to_the_end(resume_from_checkpoint, *args, **kwargs)
        except BaseException:  # Ctrl-C too: the trainer says nothing to its callbacks then, and a notebook goes on
            self._faults.guarded(self._callback.finish, self.way.trainer.control)
            raise
        finally:
            self._running = False

    def _train_to_the_end(self, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        self.returning = False
        self._callback.rollbacks = []
        resume: Any = resume_from_checkpoint
        output: Any = TrainOutput(0, 0.0, {})
        if self._decided_before(resume):
            if self.way.target is None:
                self._refuse("a rollback that an earlier process had decided cannot be made")
                return output
            resume = self.way.target.path
        while True:
            self._begun = self.goes_back = False
            self.way.resume_from = self._resolve(resume)
            try:
                output = self._train(resume, *args, **kwargs)
            except Exception as error:
                if isinstance(error, RestoreFailed):
                    self._refuse(f"the restored state failed its check: {error}")
                elif self.returning and not self._begun:
                    self._refuse(f"the trainer cannot load it: {error}")
                    if ranks.world_size() > 1:
                        raise  # the others may be waiting: only the end of this process ends their wait
                else:
                    raise  # the user's own
                return output
            if not self.goes_back:
                return output
            target = self._make_ready()
            if target is None:
                return output
            resume, self.returning = target.path, True

    def on_train_end(self, args: Any, state: Any, control: Any) -> Any:
        """Let everybody know that training is over, unless it is about to go on."""
        if not self.goes_back:
            return self._end(args, state, control)
        self._callback.on_train_end(args, state, control)
        return control

    def restore(self, state: Any) -> None:
        """Where an attempt begins: change and check; where one goes on in a new process: do as it did. On all ranks.

        Raises
        ------
        RestoreFailed
            On all ranks, out of the trainer and into `train`.
        """
        way, guard, guarded = self.way, self._callback.guard, self._faults.guarded
        if way.resume_from is None:
            guarded(way.undo)
            return
        checkpoint = way.target if self.returning else None
        if checkpoint is None and guard is not None:
            checkpoint = guarded(way.known, guard, state.global_step)
        begins = self.returning or bool(guard is not None and guarded(_begins, guard, checkpoint))
        if any(self._faults.shared(begins and way.ready)):
            rollbacks = self._callback.rollbacks
            way.restore(guard, checkpoint, rollbacks[-1].reason if rollbacks else None)
        elif guard is not None:
            guarded(way.carry_on, guard, checkpoint)

    def begun(self) -> None:
        """Say that the run has begun: what the trainer raises from now on is not about loading."""
        self._begun = True

    def _decided_before(self, resume: Any) -> bool:
        """Return whether a killed process had decided on a rollback and not got to it; then it is made ready.

        Where the user names a checkpoint, it must be the one that the trainer would have taken, or that rollback's own:
        any other is the user's decision.
        """
        self.way.target = None
        if not self.way.ready or not resume:
            return False
        guarded, shared = self._faults.guarded, self._faults.shared
        guard = guarded(self._recovering, self._resolve(resume))
        decided = any(shared(guard is not None))
        if decided:
            guarded(self.way.make_ready, guard)
            if not all(shared(self.way.target is not None)):
                self.way.target = None
        if guard is not None:
            guard.close()
        return decided

    def _recovering(self, resume: Path | None) -> KLGuard | None:
        guard = self._callback.new_guard(self.way.trainer.args)
        newest = self._resolve(True)
        if resume is not None and newest is not None and guard.recover():
            back = guard.decision.checkpoint
            own = [newest] if back is None else [newest, Path(back.path), self.way.folder_of(back.step)]
            pins = guard.folder / "pins" if guard.folder is not None else newest.parent
            if back is not None:
                own.append(pins / f"step-{back.step}")
            if resume.resolve() in [path.resolve() for path in own]:
                return guard
        guard.close()
        return None

    def _make_ready(self) -> Checkpoint | None:
        """Make everything ready for the rollback that is decided; None, and halted, where it cannot be."""
        target = self._faults.guarded(self.way.make_ready, self._callback.guard)
        if not all(self._faults.shared(target is not None)):
            self._refuse("the files could not be made ready for going back")
            return None
        self._callback.rollbacks.append(self._callback.decision)
        return target

    def _refuse(self, why: str) -> None:
        """Halt in the place of going back, or after it; the trainer does not end such a run itself."""
        callback, trainer = self._callback, self.way.trainer
        self.goes_back, callback.halted = False, True
        decision = callback.decision or (callback.rollbacks[-1] if callback.rollbacks else callback.decision)
        callback.decision = replace(decision, action="halt", note=self._faults.guarded(self._give_up, why) or why)
        trainer.is_in_train = False
        trainer.control = self._end(trainer.args, trainer.state, trainer.control)

    def _give_up(self, why: str) -> str:
        """Let the guard halt; return why, in its own words where it has given up before."""
        guard = self._callback.guard
        if guard is None:
            return why
        if guard.decision.action != "halt":
            guard.give_up(why)
        return guard.decision.note

    def _resolve(self, resume: Any) -> Path | None:
        """Return the folder that the trainer is going to resume from, as far as it can be told; None for none."""
        if not resume:
            return None
        if resume is True:
            there = checkpoints_in(Path(self.way.trainer.args.output_dir))
            return there[max(there)] if there else None
        return Path(resume)


def _begins(guard: KLGuard, checkpoint: Checkpoint | None) -> bool:
    """Whether what the present attempt does otherwise is still to be done after loading a checkpoint."""
    return (
        checkpoint is not None and guard.attempt > 0 and (guard.changes is None or checkpoint.attempt < guard.attempt)
    )


def _in_place_of(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `replacement` does under the name and signature of `original`."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return call
