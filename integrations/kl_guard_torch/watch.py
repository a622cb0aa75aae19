"""Seeing the tokens that a loss function is given, without another forward pass."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from kl_guard.tokens import TokenSummary, summarize_tokens

P = ParamSpec("P")
R = TypeVar("R")

NAMES = ("policy_logprobs", "ref_logprobs", "mask", "token_ids")
NEEDED = NAMES[:3]


def checked_ids(special_ids: Iterable[int]) -> tuple[int, ...]:
    """Return ids of special tokens, the smallest first.

    Raises
    ------
    TypeError
        For what are none.
    """
    try:
        return tuple(sorted({operator.index(one) for one in special_ids}))
    except TypeError:
        raise TypeError(f"special_ids must be token ids, whole numbers, got {special_ids!r}") from None


class TokenWatch:
    """Collects the tokens of the micro-batches of a step.

    Parameters
    ----------
    top_k:
        How many outlier tokens are kept.
    fault:
        Told of a fault in summing up; it never reaches the loss.
    special_ids:
        Ids of tokens that are no content.
    """

    def __init__(self, top_k: int, fault: Callable[[str], None], special_ids: tuple[int, ...] = ()) -> None:
        self._top_k = top_k
        self._special_ids = special_ids
        self._fault = fault
        self._parts: list[TokenSummary] = []

    def add(self, policy_logprobs: Any, ref_logprobs: Any, mask: Any, token_ids: Any = None) -> None:
        """Take in one batch; see `summarize_tokens` for shapes."""
        try:
            summary = summarize_tokens(
                policy_logprobs, ref_logprobs, mask, token_ids, self._top_k, special_ids=self._special_ids
            )
            self._parts.append(summary.fetch())
        except Exception:
            self._fault("summing up tokens")

    def take(self) -> TokenSummary | None:
        """Return what was seen since the last call, None for nothing."""
        parts, self._parts = self._parts, []
        return parts[0].merged(parts[1:]) if parts else None

    def wrap(self, loss: Callable[P, R], names: Mapping[str, str]) -> Callable[P, R]:
        """Return a loss function that lets its arguments be seen.

        Raises
        ------
        TypeError
            If it has no argument of a name that is needed.
        """
        signature = inspect.signature(loss)
        unknown = sorted(set(names) - set(NAMES))
        if unknown:
            raise TypeError(f"watch_loss has no argument {unknown[0]!r}; there are: {', '.join(NAMES)}")
        wanted = {name: names.get(name, name) for name in NAMES}
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        for name in [*NEEDED, *(name for name in names if name not in NEEDED)]:
            if wanted[name] not in signature.parameters and not takes_any:
                there = ", ".join(signature.parameters) or "none"
                raise TypeError(
                    f"the loss function has no argument {wanted[name]!r}; it has: {there}. Say which it is: "
                    f"watch_loss(loss, {name}=...)"
                )

        @functools.wraps(loss)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            result = loss(*args, **kwargs)
            if not torch.is_grad_enabled():  # an evaluation, no part of a step
                return result
            try:
                bound = signature.bind(*args, **kwargs)
                given = {**bound.arguments, **bound.kwargs}
                found = {name: given.get(argument) for name, argument in wanted.items()}
                if all(found[name] is not None for name in NEEDED):
                    self.add(**found)
            except Exception:
                self._fault("seeing the arguments of the loss")
            return result

        return watched
