"""`train()` that goes back: one call by the user, as many runs of the trainer's own loop as it takes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import TrainOutput

from kl_guard_trl.way_back import RestoreFailed, checkpoints_in

if TYPE_CHECKING:
    from kl_guard_trl.callback import KLGuardCallback

logger = logging.getLogger("kl_guard")


class Reentry:
    """Puts itself in the place of a trainer's `train`, and of the event that ends a run.

    When the guard stops a run to go back, `train` prepares the way and calls the trainer's own `train` again with the
    checkpoint. In between only the guard sees `on_train_end`, since trackers close their runs on it.
    """

    def __init__(self, callback: KLGuardCallback, trainer: Any) -> None:
        self._callback = callback
        self._trainer = trainer
        self._train: Callable[..., Any] = trainer.train
        self._end: Callable[..., Any] = trainer.callback_handler.on_train_end
        trainer.train = _in_place_of(self._train, self.train)
        trainer.callback_handler.on_train_end = _in_place_of(self._end, self.on_train_end)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, going back as often as the guard asks for it and its budget allows."""
        resume = self._callback.before_train(resume_from_checkpoint)
        output: Any = TrainOutput(0, 0.0, {})
        while True:
            self._callback.begin(self._resolve(resume))
            try:
                output = self._train(resume, *args, **kwargs)
            except Exception as error:
                if not self._callback.is_restoring and not isinstance(error, RestoreFailed):
                    raise
                self._refuse(str(error) if isinstance(error, RestoreFailed) else f"the trainer cannot load it: {error}")
                return output
            if not self._callback.goes_back:
                return output
            target = self._callback.make_ready()
            if target is None:
                self._finish()
                return output
            resume = target.path

    def on_train_end(self, args: Any, state: Any, control: Any) -> Any:
        """Let everybody know that training is over, unless it is about to go on."""
        if not self._callback.goes_back:
            return self._end(args, state, control)
        self._callback.on_train_end(args, state, control)
        return control

    def _resolve(self, resume: Any) -> Path | None:
        """Return the folder that the trainer is going to resume from, as far as it can be told; None for none."""
        if not resume:
            return None
        if resume is True:
            there = checkpoints_in(Path(self._trainer.args.output_dir))
            return there[max(there)] if there else None
        return Path(resume)

    def _refuse(self, why: str) -> None:
        self._callback.refuse(f"the restored state failed its check: {why}")
        self._finish()

    def _finish(self) -> None:
        """End a run that the trainer has not ended itself."""
        trainer = self._trainer
        trainer.is_in_train = False
        trainer.control = self._end(trainer.args, trainer.state, trainer.control)


def _in_place_of(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `replacement` does under the name and signature of `original`."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return call
