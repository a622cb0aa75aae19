"""What is done otherwise after a rollback: an exact replay would fail the same way."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kl_guard import Checkpoint, Finding, GuardConfig, learning_rate
from kl_guard.memory import Changes
from kl_guard_lightning.optimizers import Optimizers, Schedulers
from kl_guard_torch import ranks

SEED_STRIDE = 7919  # between the seeds of attempts: far enough that those of ranks do not meet


@dataclass
class RollbackContext:
    """What a function given as `on_rollback` gets, after the checkpoint is loaded and before the first step.

    What its methods do is written into the journal, so that it lasts when the process is restarted, and it is checked.
    Factors are relative to the run as it was started, so calling one twice, or in a second attempt, does not add up.
    """

    attempt: int
    """1 for the first rollback."""
    checkpoint: Checkpoint
    """Where the run has gone back to."""
    reason: Finding | None
    """What made it go back; None after a restart of the process."""
    config: GuardConfig
    trainer: Any
    module: Any
    held: Changes = field(default_factory=Changes)
    """What the restored optimizers and schedulers already hold of earlier attempts."""

    def __post_init__(self) -> None:
        self.changes = Changes(self.held.learning_rate, 1.0)
        self.seed: int | None = None

    def scale_learning_rate(self, factor: float) -> None:
        """Let the learning rate be `factor` times the original one, in all optimizers, now and for all later steps.

        Raises
        ------
        ValueError
            For a factor that is not above 0 and finite.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"factor must be a finite number above 0, got {factor!r}")
        relative = factor / self.changes.learning_rate
        learning_rate.scale(Optimizers(self.trainer), Schedulers(self.trainer), relative)
        self.changes = Changes(factor, self.changes.beta)

    def new_noise(self, seed: int | None = None) -> None:
        """Draw other random numbers from the first step on; each process its own."""
        self.seed = SEED_STRIDE * self.attempt + self.checkpoint.step if seed is None else int(seed)

    def describe(self) -> str:
        """Return in words what is done otherwise."""
        parts = []
        if not math.isclose(self.changes.learning_rate, 1.0):
            parts.append(f"learning rate x{self.changes.learning_rate:g} of the original")
        if self.seed is not None:
            parts.append("new sampling noise")
        return ", ".join(parts) or "nothing is changed, so the same may happen again"


def as_configured(context: RollbackContext) -> None:
    """Change what the configuration says: `lr_factor` to the power of the attempt, and the noise."""
    context.scale_learning_rate(context.config.lr_factor**context.attempt)
    if context.config.new_noise:
        context.new_noise()


def set_seed(seed: int) -> None:
    """Seed the streams of this process, otherwise than those of the other ranks."""
    seed = (seed + 1_000_003 * ranks.rank()) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
