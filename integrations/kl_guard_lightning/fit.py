"""`fit` that goes back: one call by the user, as many of the trainer's own as it takes."""

from __future__ import annotations

import logging
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_guard import Checkpoint, KLGuard
from kl_guard_lightning import internals
from kl_guard_lightning.base import is_trainer
from kl_guard_lightning.callback import KLGuardCallback
from kl_guard_lightning.saves import to_load
from kl_guard_lightning.way_back import GoingBack, WayBack
from kl_guard_torch import ranks
from kl_guard_torch.facts import RestoreFailed

logger = logging.getLogger("kl_guard")


def fit_with_rollback(
    trainer: Any,
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: str | os.PathLike[str] | None = None,
    weights_only: bool | None = None,
) -> None:
    """Do what `trainer.fit` does, going back as often as the guard asks for it and its budget allows.

    The trainer must have a `KLGuardCallback(action="rollback")`. On a critical finding the fit is left at that batch,
    and another one begins at the newest sound checkpoint from before the departure. Restored are weights, optimizers,
    schedulers, precision, loops, the random state of every rank, and the place in the data where the loader keeps it
    (`state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader` has). Then every step is, bit for bit, that
    of a resume from the same checkpoint in a fresh process, and of a run that was never interrupted. With any other
    loader it is that of a resume still (where the order comes from torch's random state), but not of the uninterrupted
    run: in the middle of an epoch Lightning begins the data anew, so the batches of the rest of that epoch are others.
    What a module keeps outside of its `state_dict` (buffers of samples, counters) is for its `on_load_checkpoint`, or
    for `on_rollback`, to put right.

    Callbacks see `on_exception` and `setup` in between; loggers are not told of an end.

    Parameters
    ----------
    trainer:
        Of `lightning.pytorch` or `pytorch_lightning`.
    module, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only:
        As for `trainer.fit`. Where `weights_only` is None, a checkpoint that the guard goes back to is read as tensors
        and plain values if it is made of those. One that holds other objects (hyperparameters of a class of their own)
        is unpickled only if this very process wrote it, by checksums that it holds in memory; otherwise it is left to
        Lightning, which refuses it, as in any resume.

    Raises
    ------
    TypeError
        For something that is no trainer of Lightning.
    ValueError
        If the trainer has no `KLGuardCallback`.
    KLGuardHalted
        After a halt, with `on_halt="raise"`.
    """
    if not is_trainer(trainer):
        raise TypeError(f"fit_with_rollback needs a trainer of Lightning, got {type(trainer).__name__}")
    callback = next((one for one in trainer.callbacks if isinstance(one, KLGuardCallback)), None)
    if callback is None:
        raise ValueError("the trainer has no KLGuardCallback: Trainer(callbacks=[KLGuardCallback(action='rollback')])")
    data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}
    callback.way = WayBack(trainer, callback.config, callback.keeping.saves, callback.on_rollback)
    try:
        _to_the_end(callback, trainer, module, data, ckpt_path, weights_only)
    except BaseException:  # Ctrl-C too, which may come while callbacks are told of another exception
        callback.over(failed=True)
        raise
    finally:
        callback.way = None
        callback.over()


def _to_the_end(
    callback: KLGuardCallback,
    trainer: Any,
    module: Any,
    data: dict[str, Any],
    ckpt_path: str | os.PathLike[str] | None,
    weights_only: bool | None,
) -> None:
    way = callback.way
    assert way is not None  # noqa: S101 - set by the caller
    resume: Any = ckpt_path
    loads = weights_only
    decided = _decided_before(callback, way, trainer, resume)
    if decided is not None:
        resume, loads = to_load(Path(decided.path)), way.loads_with(None, decided, weights_only)
    while True:
        loggers = list(trainer.loggers)
        way.begun = False
        try:
            trainer.fit(module, **data, ckpt_path=resume, **internals.fit_arguments(trainer, loads))
        except GoingBack:
            pass
        except RestoreFailed as error:
            _refuse(callback, trainer, f"the restored state failed its check: {error}")
            return
        except Exception as error:
            if not way.returning or way.begun:
                raise  # the user's own
            _refuse(callback, trainer, f"the trainer cannot load it: {error}{_hint(error)}")
            if ranks.world_size() > 1:
                raise  # the others may be waiting: only the end of this process ends their wait
            return
        else:
            return
        finally:
            trainer.loggers = loggers
        target = way.make_ready(callback.guard)
        if target is None:
            _refuse(callback, trainer, "the files could not be made ready for going back")
            return
        callback.rollbacks.append(callback.decision)
        way.returning = True
        resume, loads = to_load(Path(target.path)), way.loads_with(callback.guard, target, weights_only)


def _decided_before(callback: KLGuardCallback, way: WayBack, trainer: Any, resume: Any) -> Checkpoint | None:
    """Return where to go back to, if a killed process had decided on a rollback and not got to it.

    Only where the user asks for the last checkpoint, or for that rollback's own: any other is the user's decision.
    """
    if not way.ready or resume is None:
        return None
    guard = callback.new_guard(trainer)
    try:
        back = guard.decision.checkpoint if guard.recover() else None
        if back is None:
            return None
        own = Path(resume).absolute().parent.name == f"step-{back.step}" or str(resume) == "last"
        if not own:
            return None
        if int(trainer.world_size) > 1:
            logger.warning(
                "kl-guard: that rollback is not made by itself on several processes: fit from that checkpoint"
            )
            return None
        return way.make_ready(guard)
    finally:
        guard.close()


def _refuse(callback: KLGuardCallback, trainer: Any, why: str) -> None:
    """Halt in the place of going back, or after it.

    Raises
    ------
    KLGuardHalted
        With `on_halt="raise"`.
    """
    decision = callback.decision or (callback.rollbacks[-1] if callback.rollbacks else callback.decision)
    callback.halted = True
    callback.decision = replace(decision, action="halt", note=_give_up(callback.guard, why))
    for logging_to in trainer.loggers:
        logging_to.finalize("failed")
    callback.over(failed=True)
    if callback.config.on_halt == "raise":
        raise callback.as_exception()


def _hint(error: Exception) -> str:
    """Return what to do where a checkpoint holds more than tensors and plain values."""
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    return (
        " (fit_with_rollback(..., weights_only=False) unpickles it, which runs what is in it: only for files you trust)"
    )


def _give_up(guard: KLGuard | None, why: str) -> str:
    """Let the guard halt; return why, in its own words where it has given up before."""
    if guard is None:
        return why
    if guard.decision.action != "halt":
        guard.give_up(why)
    return guard.decision.note
