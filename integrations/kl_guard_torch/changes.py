"""What is done otherwise after a rollback: an exact replay would fail the same way."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kl_guard import Checkpoint, Finding, GuardConfig, learning_rate
from kl_guard.memory import Changes

logger = logging.getLogger("kl_guard")

SEED_STRIDE = 7919  # between the seeds of attempts: far enough that those of ranks do not meet


@dataclass
class RollbackContext:
    """What a function given as `on_rollback` gets, after the checkpoint is loaded and before the first step.

    Use the methods: what they do is written into the journal, so that it lasts when the process is restarted, and it is
    checked. Factors are relative to the run as it was started, so calling one twice, or in a second attempt, does not
    add up.
    """

    attempt: int
    """1 for the first rollback."""
    checkpoint: Checkpoint
    """Where the run has gone back to."""
    reason: Finding | None
    """What made it go back; None after a restart of the process."""
    config: GuardConfig
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    """Of each optimizer; None where it has none."""
    held: Changes = field(default_factory=Changes)
    """What the restored optimizers and schedulers already hold of earlier attempts."""
    base_seed: int = 0

    def __post_init__(self) -> None:
        self.changes = Changes(self.held.learning_rate, 1.0)
        self.seed: int | None = None

    def scale_learning_rate(self, factor: float) -> None:
        """Let the learning rate be `factor` times the original one, now and for all later steps.

        Raises
        ------
        ValueError
            For a factor that is not above 0 and finite.
        """
        _check("factor", factor)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            learning_rate.scale(optimizer, scheduler, factor / self.changes.learning_rate)
        self.changes = Changes(factor, self.changes.beta)

    def scale_beta(self, factor: float) -> None:
        """Let the weight of the KL penalty be `factor` times the original one; without a penalty nothing happens.

        Raises
        ------
        ValueError
            For a factor that is not above 0 and finite.
        """
        _check("factor", factor)
        if self.apply_beta(factor):
            self.changes = Changes(self.changes.learning_rate, factor)

    def apply_beta(self, factor: float) -> bool:
        """Set the weight of the penalty; return whether there is one."""
        return True

    def new_noise(self, seed: int | None = None) -> None:
        """Sample other completions from the first step on; the order of the data stays."""
        self.seed = self.base_seed + SEED_STRIDE * self.attempt if seed is None else int(seed)

    def describe(self) -> str:
        """Return in words what is done otherwise."""
        parts = []
        if not math.isclose(self.changes.learning_rate, 1.0):
            parts.append(f"learning rate x{self.changes.learning_rate:g} of the original")
        if not math.isclose(self.changes.beta, 1.0):
            parts.append(f"beta x{self.changes.beta:g}{self.beta_in_words()}")
        if self.seed is not None:
            parts.append("new sampling noise")
        return ", ".join(parts) or "nothing is changed, so the same may happen again"

    def beta_in_words(self) -> str:
        """Return what beta is now, where it is known."""
        return ""


C = TypeVar("C", bound=RollbackContext)


def change(context: C, on_rollback: Callable[[C], Any] | None) -> None:
    """Let the user's function change things; without one, or where it raises, change what is configured."""
    if on_rollback is not None:
        try:
            on_rollback(context)
            return
        except Exception:
            logger.exception("kl-guard: on_rollback raised; what is configured is changed instead")
    as_configured(context)


def as_configured(context: RollbackContext) -> None:
    """Change what the configuration says: `lr_factor` and `beta_factor` to the power of the attempt, and the noise."""
    context.scale_learning_rate(context.config.lr_factor**context.attempt)
    context.scale_beta(context.config.beta_factor**context.attempt)
    if context.config.new_noise:
        context.new_noise()


def _check(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
