"""What is done otherwise after a rollback, in a trainer of TRL or transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kl_guard_torch import changes
from kl_guard_trl import internals


@dataclass
class RollbackContext(changes.RollbackContext):
    """What a function given as `on_rollback` gets, after the checkpoint is loaded and before the first step.

    Use the methods: what they do is written into the journal, so that it lasts when the process is restarted, and it is
    checked. Factors are relative to the run as it was started, so calling one twice, or in a second attempt, does not
    add up.
    """

    trainer: Any = None
    original_beta: float | None = None
    """The weight of the KL penalty as the run was started."""

    @property
    def optimizer(self) -> Any:
        """The trainer's."""
        return self.optimizers[0]

    @property
    def lr_scheduler(self) -> Any:
        """The trainer's."""
        return self.schedulers[0]

    def apply_beta(self, factor: float) -> bool:
        """Set the trainer's beta; return whether it has one."""
        if self.original_beta:
            internals.set_beta(self.trainer, self.original_beta * factor)
        return bool(self.original_beta)

    def beta_in_words(self) -> str:
        """Return what beta is now."""
        return f" (now {internals.beta_of(self.trainer):g})"
