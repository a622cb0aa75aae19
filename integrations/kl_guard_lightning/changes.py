"""What is done otherwise after a rollback: an exact replay would fail the same way."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kl_guard_torch import changes, ranks

RANK_STRIDE = 1_000_003  # between the seeds of ranks


@dataclass
class RollbackContext(changes.RollbackContext):
    """What a function given as `on_rollback` gets, after the checkpoint is loaded and before the first step.

    What its methods do is written into the journal, so that it lasts when the process is restarted, and it is checked.
    Factors are relative to the run as it was started, so calling one twice, or in a second attempt, does not add up.
    The weight of a KL penalty is the module's own: in a buffer it is saved with the checkpoints to come.
    """

    trainer: Any = None
    module: Any = None

    def apply_beta(self, factor: float) -> bool:
        """Change nothing: where a module keeps the weight of its penalty is not known here."""
        return False


def set_seed(seed: int) -> None:
    """Seed the streams of this process, otherwise than those of the other ranks."""
    seed = (seed + RANK_STRIDE * ranks.rank()) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
