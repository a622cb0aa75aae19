"""Ending a fit at this very batch, without a bad state being saved under a name that means good."""

from __future__ import annotations

import functools
import logging
from typing import Any

from kl_guard_lightning import internals
from kl_guard_lightning.base import saves_checkpoints

logger = logging.getLogger("kl_guard")

SAVING = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end", "on_train_end", "on_exception")


class Stop:
    """Takes the turns of checkpoint callbacks away until the fit is over, and asks the trainer to stop.

    Trainers run checkpoint callbacks after all others, so none of them has saved the step at hand. Their hooks do
    nothing from now on: they neither save nor rotate, and what they remember of best and last stays as it is.
    """

    def __init__(self) -> None:
        self._muted: list[Any] = []
        self._least: dict[str, Any] | None = None
        self._trainer: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(muted={len(self._muted)})"

    def mute(self, trainer: Any) -> None:
        """Let no checkpoint callback save any more in this fit."""
        for callback in trainer.callbacks:
            if saves_checkpoints(callback) and callback not in self._muted:
                self._muted.append(callback)
                for name in SAVING:
                    vars(callback)[name] = _nothing
                vars(callback)["on_exception"] = functools.partial(self._last_turn, callback)

    def ask(self, trainer: Any) -> None:
        """Ask the trainer to stop after this batch, and see to it that it does not have to go on."""
        trainer.should_stop = True
        if self._trainer is None:
            self._trainer, self._least = trainer, internals.lift_least(trainer)
            if self._least is None:
                logger.warning(
                    "kl-guard: this version of Lightning does not let the guard lift min_steps and min_epochs: "
                    "training goes on until they are reached, without saving"
                )

    def over(self) -> None:
        """Put everything back: the fit is over."""
        for callback in self._muted:
            _give_back(callback)
        self._muted.clear()
        if self._trainer is not None:
            internals.put_least_back(self._trainer, self._least or {})
            self._trainer.should_stop = False  # before 2.6 it would end the next fit as well
            self._trainer = None

    def _last_turn(self, callback: Any, *_: Any, **__: Any) -> None:
        """Stand in for `on_exception`, after which nothing of this fit is called any more."""
        _give_back(callback)
        self._muted.remove(callback)


def _give_back(callback: Any) -> None:
    for name in SAVING:
        vars(callback).pop(name, None)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook that is not to be called."""
