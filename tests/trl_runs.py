"""Callbacks and helpers for tests that train."""

from __future__ import annotations

import torch
from transformers import TrainerCallback


class SetKL(TrainerCallback):
    """Puts other numbers where the guard finds them, step and log: `values(step)`, or None to leave it."""

    def __init__(self, values, key="kl"):
        self.values = values
        self.key = key

    def patch(self, trainer):
        """Put the numbers in place of those that the trainer computes in each step."""
        accelerator = trainer.accelerator
        if self.key == "grad_norm":
            clip = accelerator.clip_grad_norm_
            accelerator.clip_grad_norm_ = lambda *args: self._norm(trainer, clip(*args))
        if self.key != "kl" or self.values is None or not hasattr(trainer, "_compute_loss"):
            return
        compute, generate = trainer._compute_loss, trainer._generate_and_score_completions

        def compute_loss(model, inputs):
            logged = trainer._metrics["train"]["kl"]
            before = len(logged)
            loss = compute(model, inputs)
            value = self.values(trainer.state.global_step + 1)
            if isinstance(value, float) and trainer.model.training:  # the trainer itself takes the mean of them
                logged[before:] = [value]
            return loss

        def generate_completions(*args):
            output = generate(*args)
            if isinstance(self.values(trainer.state.global_step + 1), float) and trainer.model.training:
                trainer._metrics["train"].pop("kl", None)  # RLOO has it here already
            return output

        trainer._compute_loss, trainer._generate_and_score_completions = compute_loss, generate_completions

    def _norm(self, trainer, norm):
        value = self.values(trainer.state.global_step + 1)
        return norm if value is None else torch.full_like(norm, value)

    def on_log(self, args, state, control, logs=None, **kwargs):
        value = self.values(state.global_step)
        if "loss" in logs and value is not None:
            logs[self.key] = value
            if isinstance(value, float):  # what the trainer saves must be plain
                state.log_history[-1][self.key] = value


def patch(trainer, callbacks):
    """Let what the callbacks set be seen in each step too."""
    for callback in callbacks:
        if isinstance(callback, SetKL):
            callback.patch(trainer)


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
