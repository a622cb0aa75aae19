"""Per-token log-probs that a training step returns beside its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kl_guard.token_stats import Array, TokenStats, put_together
from kl_guard.tokens import TokenSummary, summarize_tokens
from kl_guard_torch import ranks
from kl_guard_torch.faults import Faults

NEEDED = ("policy_logprobs", "ref_logprobs", "mask")


@dataclass
class Tokens:
    """Sums up the tokens of each batch on their device, and merges the batches of an optimizer step.

    Parameters
    ----------
    faults:
        Keeps faults of the guard inside.
    top_k:
        How many of the tokens with the largest KL are kept.
    special_ids:
        Ids of tokens that are no content.
    """

    faults: Faults
    top_k: int
    special_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._batches: list[TokenSummary] = []

    @property
    def seen(self) -> bool:
        """Whether the step at hand has tokens, on this rank."""
        return bool(self._batches)

    def take_batch(self, outputs: Any) -> None:
        """Take in what a training step returned, where it holds what is needed."""
        if not isinstance(outputs, Mapping) or any(not isinstance(outputs.get(n), torch.Tensor) for n in NEEDED):
            return
        policy, reference, mask = (outputs[name] for name in NEEDED)
        ids = outputs.get("token_ids")
        self._batches.append(summarize_tokens(policy, reference, mask, ids, self.top_k, special_ids=self.special_ids))

    def end_step(self) -> TokenStats | None:
        """Return the tokens of the step, of all ranks together, and begin anew. Every process must call this."""
        batches, self._batches = self._batches, []
        rows = self.faults.guarded(_rows, batches)
        everywhere = self.faults.shared(rows)
        return self.faults.guarded(_together, everywhere)

    def forget(self) -> None:
        """Drop what belongs to a step that was not finished."""
        self._batches = []


def _rows(batches: list[TokenSummary]) -> Array | None:
    if not batches:
        return None
    first, *rest = batches
    return first.merged(rest).fetch().numpy()


def _together(everywhere: list[Array | None]) -> TokenStats | None:
    given = [(rank, rows) for rank, rows in enumerate(everywhere) if rows is not None]
    if not given:
        return None
    of_rows = [rank for rank, rows in given for _ in range(len(rows))]
    return put_together(np.concatenate([rows for _, rows in given]), of_rows if ranks.world_size() > 1 else None)
