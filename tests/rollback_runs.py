"""Real runs that see trouble once, and go back."""

from __future__ import annotations

from transformers import TrainerCallback

from kl_guard_trl import KLGuardCallback
from trl_runs import SetKL

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 14}


def guarded(make_trainer, *callbacks, knobs=None, trouble=8, on_rollback=None, attach=True, **arguments):
    """Train with a guard that sees trouble from step `trouble` on, in the first attempt only."""
    guard = KLGuardCallback(action="rollback", on_rollback=on_rollback, **(knobs or {}))
    shown = SetKL(lambda step: 1000.0 if step >= trouble and not guard.rollbacks else 0.01)
    trainer = make_trainer([shown, guard, *callbacks], **{**SAVING, **arguments})
    for callback in callbacks:
        callback.trainer = trainer
    if attach:
        guard.attach(trainer)
    return guard, trainer


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "kl_guard"]


class Tracker(TrainerCallback):
    """Opens a run at the beginning and closes it at the end, as trackers do."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")
