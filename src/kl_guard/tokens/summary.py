"""One batch's tokens in one small tensor: made on the device, without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from kl_guard import token_stats as layout
from kl_guard.token_stats import Outlier, TokenStats, put_together
from kl_guard.tokens.estimators import check_logprobs, check_mask

Names = tuple[Sequence[str | int] | None, Sequence[str] | None]
"""Names of a batch's rows, and their prompts."""

PROMPT = 80  # characters of a prompt that are kept with an outlier
BLOCK = 128  # tokens of which only the extremes are looked at first


class TokenSummary:
    """KL of the tokens of one batch or more, as one small tensor on their device.

    Attributes
    ----------
    values:
        [parts, numbers], float64 (float32 where the device has no float64); one row for each batch.
    """

    def __init__(self, values: Tensor, names: Sequence[Names | None] = ()) -> None:
        self.values = values
        self._names = list(names) or [None] * len(values)
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._stats: TokenStats | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(parts={len(self.values)}, device={self.values.device})"

    def merged(self, others: Iterable[TokenSummary]) -> TokenSummary:
        """Return the summary of these and other tokens, on the device still.

        Raises
        ------
        ValueError
            For summaries with another `top_k`.
        """
        summaries = [self, *others]
        if len({summary.values.shape[1] for summary in summaries}) > 1:
            raise ValueError("only summaries made with the same top_k can be merged")
        names = [name for summary in summaries for name in summary._names]
        return TokenSummary(torch.cat([summary.values for summary in summaries]), names)

    def fetch(self) -> TokenSummary:
        """Begin to copy the values to the CPU, without waiting for it."""
        if self._host is None:
            if self.values.is_cuda:
                host = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
                self._host = host.copy_(self.values, non_blocking=True)
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
                self._copied.record(torch.cuda.current_stream(self.values.device))
            else:
                self._host = self.values.cpu()
        return self

    def numpy(self) -> layout.Array:
        """Return the values on the CPU; waits for the device where it has to."""
        self.fetch()
        assert self._host is not None  # noqa: S101 - fetched just now
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.double().numpy()

    def read(self) -> TokenStats:
        """Return the plain numbers; waits for the device where it has to."""
        if self._stats is None:
            stats = put_together(self.numpy())
            self._stats = stats.with_outliers([self._named(outlier) for outlier in stats.outliers])
        return self._stats

    def _named(self, outlier: Outlier) -> Outlier:
        names = self._names[outlier.part]
        if names is None:
            return outlier
        samples, prompts = names
        sample = None if samples is None else samples[outlier.row]
        prompt = None if prompts is None or prompts[outlier.row] is None else str(prompts[outlier.row])[:PROMPT]
        return replace(outlier, sample=sample, prompt=prompt)


@torch.no_grad()
def summarize_tokens(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    token_ids: Tensor | None = None,
    top_k: int = 16,
    *,
    pad_token_id: int | None = None,
    eos_token_ids: Iterable[int] = (),
    special_ids: Iterable[int] = (),
    sample_ids: Sequence[str | int] | None = None,
    prompts: Sequence[str] | None = None,
) -> TokenSummary:
    """Sum up the KL of a batch's tokens in one pass on their device; nothing waits for the device.

    Parameters
    ----------
    policy_logprobs, ref_logprobs:
        Log-probs of the sampled tokens, [batch, tokens] or [tokens], any floating type; float32 or better inside.
    mask:
        Tokens that count, same shape, bool or 0 and 1. What the others hold does not matter.
    token_ids:
        Ids of the tokens, same shape; None where they are not known.
    top_k:
        How many of the tokens with the largest KL are kept with all that is known of them.
    pad_token_id, eos_token_ids:
        With them, tokens of padding that the mask lets through are counted: those behind an end of sequence. Needs
        `token_ids`.
    special_ids:
        Tokens that are no content, such as those of the chat template: they reach 10 to 100 times the KL of the others
        while all is well, so that KL without them is told as well. Needs `token_ids`.
    sample_ids, prompts:
        A name and the prompt for each row, on the CPU; outlier tokens carry them (of a prompt its first 80 characters).

    Returns
    -------
    TokenSummary
        `.read()` gives plain numbers, `.merged()` puts batches together.

    Raises
    ------
    TypeError, ValueError
        For inputs whose type, shape or device do not fit, or a `top_k` that is no whole number of at least 1.

    Examples
    --------
    >>> policy = torch.tensor([[-1.0, -2.0, -3.0]])
    >>> reference = torch.tensor([[-1.0, -2.5, -1.0]])
    >>> stats = summarize_tokens(policy, reference, torch.tensor([[True, True, True]])).read()
    >>> round(stats.kl_token_mean, 4), round(stats.kl_max, 4), stats.outliers[0].position
    (1.4985, 4.3891, 2)
    """
    check_logprobs(policy_logprobs, ref_logprobs)
    check_mask(mask, policy_logprobs)
    if token_ids is not None:
        check_mask(token_ids, policy_logprobs, "token_ids")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k must be a whole number of at least 1, got {top_k!r}")
    width = policy_logprobs.shape[-1] if policy_logprobs.dim() else 1
    batch = _Batch(policy_logprobs, ref_logprobs, mask, token_ids, width)
    row = torch.zeros(layout.row_length(top_k), dtype=batch.real, device=policy_logprobs.device)
    row[layout.EXCERPT :] = -1.0
    row[layout.WIDTH] = width
    row[layout.PADDING] = row[layout.PLAIN_TOKENS] = math.nan
    if batch.size:
        special = tuple(sorted(set(special_ids)))
        if token_ids is not None and special:
            batch.special = _is_one_of(token_ids.reshape(-1), special)
        _fill(row, batch, top_k)
        if token_ids is not None and pad_token_id is not None:
            row[layout.PADDING] = _padding(token_ids, mask, pad_token_id, tuple(eos_token_ids))
    for name, values in (("sample_ids", sample_ids), ("prompts", prompts)):
        if values is not None and width * len(values) != policy_logprobs.numel():
            raise ValueError(f"{name} must have one entry for each row, got {len(values)}")
    names = None if sample_ids is None and prompts is None else (sample_ids, prompts)
    return TokenSummary(row.unsqueeze(0), [names])


class _Batch:
    """The log-ratios of a batch in one line, 0 where the mask is and padded with 0 to whole blocks; and its mask.

    Two buffers do for everything: fresh memory for each step of the work would cost more than the work.
    """

    def __init__(self, policy: Tensor, reference: Tensor, mask: Tensor, ids: Tensor | None, width: int) -> None:
        self.policy, self.reference = policy.detach().reshape(-1), reference.detach().reshape(-1)
        self.ids, self.mask = None if ids is None else ids.reshape(-1), mask.reshape(-1)
        self.special: Tensor | None = None
        self.width, self.size = width, policy.numel()
        self.real = torch.float32 if policy.device.type == "mps" else torch.float64
        dtype = torch.promote_types(torch.promote_types(policy.dtype, reference.dtype), torch.float32)
        self.x, self.line = torch.empty(2, -(-self.size // BLOCK) * BLOCK, dtype=dtype, device=policy.device)
        self.x[self.size :] = 0.0
        inside = self.x[: self.size]
        if not self.size:
            return
        torch.sub(self.reference.to(dtype), self.policy.to(dtype), out=inside)
        # All bits or none: a product would turn what is not finite under the mask into NaN.
        whole = torch.int32 if dtype == torch.float32 else torch.int64
        keep = self.line.view(whole)[: self.size]
        keep.copy_(mask.reshape(-1).to(torch.bool)).neg_()
        inside.view(whole).bitwise_and_(keep)
        inside.clamp_(max=torch.finfo(dtype).max)  # exp(x) - x of +inf would be NaN
        keep = keep.view(-1, width)
        self.position = torch.arange(width, dtype=whole, device=policy.device)
        self.at_position = keep.sum(0, dtype=whole).neg_().to(self.real)  # tokens
        self.last = keep.bitwise_and_(self.position).amax(1).long()  # position of the last token of each completion


def _fill(row: Tensor, batch: _Batch, top_k: int) -> None:
    """Put what there is to say about a batch into its row."""
    x, line = batch.x, batch.line
    listed = _list_top(row, batch, top_k)
    torch.expm1(x, out=line).sub_(x)
    line.index_fill_(0, listed, 0.0)  # these are added exactly, when the row is read
    kl = line[: batch.size].view(-1, batch.width)
    place = ((batch.position + 1).to(torch.float32).view(torch.int32) >> 23).sub_(127).long()  # floor of log2, exactly
    row[layout.PLACE_MASS : layout.PLACE_TOKENS].scatter_add_(0, place, kl.sum(0).to(batch.real))
    row[layout.PLACE_TOKENS : layout.HISTOGRAM].scatter_add_(0, place, batch.at_position)
    end_mass = kl.gather(1, batch.last.unsqueeze(1)).sum()
    row[layout.K1_SUM : layout.K3_REST + 1] = torch.stack([x.sum(), torch.dot(x, x), end_mass, line.sum()])
    row[layout.TOKENS] = tokens = batch.at_position.sum()
    if batch.special is not None:
        row[layout.PLAIN_TOKENS] = (~batch.special & batch.mask.to(torch.bool)).sum()
        row[layout.PLAIN_MASS] = kl.reshape(-1).masked_fill(batch.special, 0.0).sum()
    histogram = row[layout.HISTOGRAM : layout.EXCERPT]
    _count(line, histogram)
    histogram[0] += tokens - x.numel()  # what the mask and the padding put there


def _count(line: Tensor, histogram: Tensor) -> None:
    """Count by the leading bits of a float32, its exponent and three bits of its fraction; `line` is used up."""
    bins = line.to(torch.float32).view(torch.int32).bitwise_right_shift_(20).bitwise_and_(2047)
    counts = (_counts_by_scatter if bins.is_cuda else _counts)(bins).to(histogram.dtype)
    histogram[0] = counts[: layout.LOWEST_BIN].sum()
    histogram[1:] = counts[layout.LOWEST_BIN :]


def _counts(bins: Tensor) -> Tensor:
    return torch.bincount(bins, minlength=2048)


def _counts_by_scatter(bins: Tensor) -> Tensor:
    """Do the same without waiting: on a GPU, `bincount` asks for the largest bin first."""
    ones = torch.ones(1, dtype=torch.int32, device=bins.device).expand_as(bins)
    return torch.zeros(2048, dtype=torch.int32, device=bins.device).scatter_add_(0, bins.long(), ones)


def _list_top(row: Tensor, batch: _Batch, top_k: int) -> Tensor:
    """Put the tokens with the largest KL into the row; return their indices.

    KL grows with the log-ratio on either side of 0, so the largest lie in the blocks whose extremes have the largest.
    """
    blocks = batch.x.view(-1, BLOCK)
    extremes = torch.stack([blocks.amax(1), blocks.amin(1)]).to(batch.real)
    row[layout.HIGHEST], row[layout.LOWEST] = extremes[0].amax(), extremes[1].amin()
    best = torch.expm1(extremes).sub_(extremes).amax(0).topk(min(top_k, len(blocks))).indices
    among = blocks[best].view(-1).to(batch.real)
    kl, order = torch.expm1(among).sub_(among).topk(min(top_k, among.numel()))
    index = best[order // BLOCK] * BLOCK + order % BLOCK
    inside = index.clamp(max=batch.size - 1)
    top = row[layout.TOP :].view(-1, layout.TOP_FIELDS)[: len(index)]
    top[:, 0], top[:, 1] = batch.policy[inside], batch.reference[inside]
    if batch.ids is not None:
        top[:, 2] = batch.ids[inside]
        _put_around(row, batch, batch.ids, inside[: layout.EXCERPTS])
    top[:, 3] = torch.where(kl == 0, -1, index)  # masked, padded, or without KL
    top[:, 4] = layout.ENDS * (batch.last[inside // batch.width] == inside % batch.width)
    if batch.special is not None:
        top[:, 4] += layout.SPECIAL * batch.special[inside]
    return index


def _put_around(row: Tensor, batch: _Batch, ids: Tensor, centres: Tensor) -> None:
    """Put the neighbours of the largest tokens into the row."""
    shape = (layout.EXCERPTS, layout.AROUND, layout.EXCERPT_FIELDS)
    around = row[layout.EXCERPT : layout.TOP].view(shape)[: len(centres)]
    centres = centres.unsqueeze(1)
    index = centres + torch.arange(layout.AROUND, device=centres.device) - layout.BEFORE
    there = index.div(batch.width, rounding_mode="floor") == centres.div(batch.width, rounding_mode="floor")
    index = index.clamp(0, batch.size - 1)
    tokens = ids[index].long()
    around[..., 0] = torch.where(
        there, torch.where(batch.mask[index].to(torch.bool), tokens, -2 - tokens.clamp(min=0)), -1
    )
    around[..., 1] = batch.x[index]


def _is_one_of(ids: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """Return where `ids` are among others, which are sorted."""
    others = _on_device(wanted, ids.device)
    ids = ids.to(others.dtype).contiguous()
    found = torch.searchsorted(others, ids).clamp_(max=len(wanted) - 1)
    return others[found] == ids


@lru_cache(maxsize=16)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor; kept, since copying them to a device waits for it."""
    return torch.tensor(values, device=device)


def _padding(ids: Tensor, mask: Tensor, pad: int, ends: Iterable[int]) -> Tensor:
    """Count padding inside the mask, behind an end of sequence: a policy may sample the token of padding before it.

    Where padding and end of sequence are one id, the first of a row of them is the end itself.
    """
    before = ids[..., :-1]
    ended = before == pad if pad in ends else torch.zeros_like(before, dtype=torch.bool)
    for end in ends:
        ended = ended | (before == end)
    behind = ended.cumsum(-1) > 0
    follows = ended | (before == pad)
    return (behind & follows & (ids[..., 1:] == pad) & mask[..., 1:].to(torch.bool)).sum()
