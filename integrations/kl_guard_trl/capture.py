"""Per-token log-probs and metrics of each optimizer step, from what the trainer computes anyway."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kl_guard import GuardConfig
from kl_guard.observation import shown
from kl_guard.token_keeper import LONGEST, is_fault
from kl_guard.token_stats import Array, Outlier, TokenStats, put_together
from kl_guard.tokens import TokenSummary, summarize_tokens
from kl_guard_torch.faults import Faults
from kl_guard_trl import internals
from kl_guard_trl.probe import ReferenceProbe

PROMPT_TOKENS = 24  # of a prompt's beginning that are kept with an outlier
TELLING = 0.01  # nats: below it the prompt of a token says nothing
OFTEN_ENOUGH = 3  # steps without tokens after which it is said that there are none


@dataclass
class Batch:
    """What one micro-batch gave: its summary, and the prompts of its rows."""

    summary: TokenSummary
    prompt_ids: Tensor | None
    prompt_mask: Tensor | None


Prompts = dict[tuple[int, int], str]
"""How the prompts of rows begin, by micro-batch and row."""


@dataclass
class Share:
    """What one rank has to say about a step: the rows of its micro-batches, their prompts, and both together."""

    rows: Array
    prompts: Prompts
    stats: TokenStats


@dataclass
class Step:
    """What one optimizer step gave so far."""

    batches: list[Batch] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    grad_norm: Any = None
    unscored: list[tuple[Tensor, Any]] = field(default_factory=list)


class Capture:
    """Wraps what the trainer calls for each micro-batch, and keeps what passes there until the step is over.

    No forward pass is added, and nothing of what the trainer computes is changed.

    Parameters
    ----------
    trainer:
        A `GRPOTrainer` or `RLOOTrainer`.
    config:
        The knobs.
    faults:
        Keeps faults of the guard inside.
    probe:
        Scores with a reference where the trainer has none.

    Attributes
    ----------
    watches:
        Whether anything is kept; off where another callback guards.
    why_no_steps, why_no_tokens:
        Why steps cannot be watched one by one, or tokens not at all; "" where they can.
    """

    def __init__(self, trainer: Any, config: GuardConfig, faults: Faults, probe: ReferenceProbe | None = None) -> None:
        self.trainer = trainer
        self.config = config
        self.probe = probe
        self.watches = True
        self.why_no_steps = internals.why_no_steps(trainer)
        self.why_no_tokens = self.why_no_steps or internals.why_no_tokens(trainer)
        self._faults = faults
        self._step = Step()
        self._in_loss = self._generating = False
        self._logprobs: Tensor | None = None
        self._with_gradient = False
        self._generated: list[Tensor] = []
        self._without_tokens = 0
        self._ends: tuple[int | None, tuple[int, ...]] | None = None
        self._special: tuple[int, ...] = ()
        if not self.why_no_steps:
            self._wrap("compute_loss", self._compute_loss)
            self._wrap("_generate_and_score_completions", self._generate)
            self._wrap_clipping()
        if not self.why_no_tokens:
            self._wrap("_get_per_token_logps_and_entropies", self._score)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(why_no_tokens={self.why_no_tokens!r})"

    # What the trainer calls; each calls the original once, and what that returns or raises goes back unchanged.

    def _wrap(self, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(self.trainer, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(self.trainer, name, call)

    def _wrap_clipping(self) -> None:
        accelerator = self.trainer.accelerator
        original = accelerator.clip_grad_norm_

        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self._step.grad_norm = norm = original(*args, **kwargs)
            return norm

        accelerator.clip_grad_norm_ = clip_grad_norm_

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.watches and self.trainer.model.training):
            return original(model, inputs, *args, **kwargs)
        before = self._faults.guarded(internals.metric_lengths, self.trainer) or {}
        self._in_loss, self._logprobs, self._with_gradient = True, None, False
        try:
            loss = original(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        self._faults.guarded(self._take_metrics, before)
        self._faults.guarded(self._take_tokens, inputs)
        self._logprobs = None
        return loss

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.watches and self.trainer.model.training):
            return original(*args, **kwargs)
        before = self._faults.guarded(internals.metric_lengths, self.trainer) or {}
        self._generating, self._generated = True, []
        try:
            output = original(*args, **kwargs)
        finally:
            self._generating = False
        self._faults.guarded(self._take_metrics, before)
        self._faults.guarded(self._pass_on_reference, output)
        self._generated = []
        return output

    def _score(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._in_loss or self._generating:
            self._faults.guarded(self._keep_scores, result)
        return result

    def _keep_scores(self, result: Any) -> None:
        """Keep log-probs; in a loss those with a gradient, since a subclass may score other models there as well."""
        scores: Tensor = result[0]
        if self._generating:
            self._generated.append(scores.detach())
        elif self._logprobs is None or (scores.requires_grad and not self._with_gradient):
            self._logprobs, self._with_gradient = scores.detach(), scores.requires_grad

    # What is kept of it.

    def _take_metrics(self, before: dict[str, int]) -> None:
        for name, values in internals.new_metrics(self.trainer, before).items():
            self._step.metrics.setdefault(name, []).extend(values)

    def _pass_on_reference(self, output: Any) -> None:
        """RLOO scores the reference when it generates and drops it: let it travel with the batch, as in GRPO."""
        if internals.drops_reference(self.trainer, output) and len(self._generated) == 2:
            reference = self._generated[-1]
            if reference.shape == output["completion_ids"].shape:
                output["ref_per_token_logps"] = reference

    def _take_tokens(self, inputs: Any) -> None:
        if self.why_no_tokens:
            return
        reference = inputs.get("ref_per_token_logps")
        if reference is None and self._logprobs is not None and self.probe is not None and self.probe.due():
            self._step.unscored.append((self._logprobs, inputs))
            return
        if self._logprobs is None or reference is None:
            self._miss(reference)
            return
        self._without_tokens = -1
        self.add(self._logprobs, reference, inputs)

    def add(self, policy: Tensor, reference: Tensor, inputs: Any) -> None:
        """Take in the log-probs of a micro-batch."""
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        if self._ends is None:
            self._ends = internals.special_ids(self.trainer)
            self._special = internals.content_free_ids(self.trainer)
        pad, ends = self._ends
        summary = summarize_tokens(
            policy,
            reference,
            mask,
            ids,
            self.config.outlier_top_k,
            pad_token_id=pad,
            eos_token_ids=ends,
            special_ids=(*self._special, *ends),
        )
        prompts = (inputs.get("prompt_ids"), inputs.get("prompt_mask")) if self.config.log_text else (None, None)
        self._step.batches.append(Batch(summary, *prompts))

    def _miss(self, reference: Tensor | None) -> None:
        """Say once that no tokens come, where KL is computed: a fused loss, or another version, does it elsewhere."""
        if internals.beta_of(self.trainer) == 0 or self._without_tokens < 0:
            return
        self._without_tokens += 1
        if self._without_tokens == OFTEN_ENOUGH:
            what = "log-probs of the policy" if self._logprobs is None else "log-probs of the reference"
            self._faults.say_once(
                "no tokens",
                f"{what} do not pass where the guard looks for them (a fused loss or another version of the trainer?); "
                f"it goes on with the scalars that are logged",
            )

    def note_learning_rate(self, optimizer: Any) -> None:
        """Keep the rate that the optimizer has just made its step with."""
        groups = getattr(optimizer, "param_groups", None)
        if groups:
            self._step.metrics["learning_rate"] = [float(groups[0]["lr"])]

    # At the end of a step.

    def forget(self) -> None:
        """Drop what belongs to a policy that was left behind, or to a step that was not finished."""
        self._step = Step()

    def collect(self) -> tuple[TokenStats | None, dict[str, float]]:
        """Return what the step gave, of all ranks together, and begin the next one. Every process must call this."""
        self._faults.guarded(self._probe)
        step, self._step = self._step, Step()
        mine = self._faults.guarded(self._own, step)
        everywhere = self._faults.shared(mine)
        stats = mine.stats if mine is not None and len(everywhere) == 1 else None
        if len(everywhere) > 1:
            stats = self._faults.guarded(_together, everywhere)
        return stats, self._faults.guarded(_means, step) or {}

    def _probe(self) -> None:
        """Score what is to be probed: now, when nothing is left of the step that a forward pass could disturb."""
        waiting, self._step.unscored = self._step.unscored, []
        for policy, inputs in waiting:
            assert self.probe is not None  # noqa: S101 - it asked for them
            reference = self._faults.guarded(self.probe.score, inputs) if not self.probe.why_not else None
            if reference is None:
                self.probe.why_not = self.probe.why_not or "a fault of the guard"
                self._faults.say_once("probe", f"no probe of the reference any more: {self.probe.why_not}")
                return
            self.add(policy, reference, inputs)

    def _own(self, step: Step) -> Share | None:
        """Return this rank's share of the step."""
        if not step.batches:
            return None
        first, *rest = step.batches
        rows = first.summary.merged(batch.summary for batch in rest).fetch().numpy()
        stats = put_together(rows)
        prompts: Prompts = {}
        if self.config.log_text:
            prompts = self._faults.guarded(self._prompts, step, stats.outliers) or {}
        return Share(rows, prompts, stats.with_outliers(_with_prompts(stats.outliers, prompts)))

    def _prompts(self, step: Step, outliers: Iterable[Outlier]) -> Prompts:
        """Return how the prompts of the rows begin that hold tokens with some KL."""
        processor = internals.tokenizer(self.trainer)
        kept: dict[tuple[int, int], list[int]] = {}
        for outlier in outliers:
            key, batch = (outlier.part, outlier.row), step.batches[outlier.part]
            if key in kept or outlier.kl < TELLING or processor is None or batch.prompt_ids is None:
                continue
            ids = batch.prompt_ids[outlier.row].tolist()
            mask = [1] * len(ids) if batch.prompt_mask is None else batch.prompt_mask[outlier.row].tolist()
            kept[key] = [token for token, counts in zip(ids, mask, strict=True) if counts][:PROMPT_TOKENS]
        if not kept:
            return {}
        try:
            texts = list(processor.batch_decode(list(kept.values())))
        except BaseException as error:
            if not is_fault(error):
                raise
            self._faults.say_once("prompts", f"the text of prompts is not known: {shown(repr(error))}")
            return {}
        return {key: text[:LONGEST] for key, text in zip(kept, texts, strict=False) if isinstance(text, str)}


def _with_prompts(outliers: Iterable[Outlier], prompts: Prompts) -> list[Outlier]:
    return [outlier.described(prompts.get((outlier.part, outlier.row)), outlier.text) for outlier in outliers]


def _together(everywhere: list[Share | None]) -> TokenStats | None:
    """Put the rows of all ranks together; the parts of a rank are counted within it."""
    given = [(rank, share) for rank, share in enumerate(everywhere) if share is not None]
    if not given:
        return None
    of_rows = [(rank, part) for rank, share in given for part in range(len(share.rows))]
    stats = put_together(np.concatenate([share.rows for _, share in given]), [rank for rank, _ in of_rows])
    prompts = {rank: share.prompts for rank, share in given}
    outliers = [replace(outlier, part=of_rows[outlier.part][1]) for outlier in stats.outliers]
    return stats.with_outliers([_with_prompts([outlier], prompts[outlier.rank])[0] for outlier in outliers])


def _means(step: Step) -> dict[str, float]:
    """Return the means of the step's own metrics over micro-batches; like the trainer's, without those that are NaN."""
    means = {name: _mean(values) for name, values in step.metrics.items() if values}
    if step.grad_norm is not None:
        norm = step.grad_norm
        means["grad_norm"] = float(norm.item() if isinstance(norm, torch.Tensor) else norm)
    return means


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
