"""Callbacks and helpers for tests that train."""

from __future__ import annotations

from transformers import TrainerCallback


class SetKL(TrainerCallback):
    """Puts other numbers into the log before the guard sees it: `values(step)`, or None to leave it."""

    def __init__(self, values, key="kl"):
        self.values = values
        self.key = key

    def on_log(self, args, state, control, logs=None, **kwargs):
        value = self.values(state.global_step)
        if "loss" in logs and value is not None:
            logs[self.key] = value
            if isinstance(value, float):  # what the trainer saves must be plain
                state.log_history[-1][self.key] = value


class Events(TrainerCallback):
    """Counts what the trainer did."""

    def __init__(self):
        self.steps = self.saves = self.evaluations = 0
        self.logs = []

    def on_step_end(self, *args, **kwargs):
        self.steps += 1

    def on_save(self, args, state, control, **kwargs):
        self.saves += 1

    def on_evaluate(self, *args, **kwargs):
        self.evaluations += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def training_logs(trainer):
    """The rows of the trainer's own history that are training logs."""
    return [row for row in trainer.state.log_history if "loss" in row]
