"""What one step's tokens say about KL, as plain numbers: put together from the rows that `kl_guard.tokens` makes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# The layout of a row: one batch of tokens in float64.
TOKENS, WIDTH, K1_SUM, SQUARES, END_MASS, K3_REST, HIGHEST, LOWEST, PADDING, PLAIN_TOKENS, PLAIN_MASS = range(11)
HEAD = 11
PLACES = 24  # buckets of positions: 0, 1-2, 3-6, 7-14, ...
BINS_PER_OCTAVE = 8
LOWEST_OCTAVE = 87  # biased exponent of 2**-40: smaller KL shares one bin
LOWEST_BIN = LOWEST_OCTAVE * BINS_PER_OCTAVE
BINS = 256 * BINS_PER_OCTAVE - LOWEST_BIN + 1  # the first one holds what is smaller
INFINITE, NOT_A_NUMBER = BINS - 8, BINS - 4  # first bins of inf and of NaN
PLACE_MASS = HEAD
PLACE_TOKENS = PLACE_MASS + PLACES
HISTOGRAM = PLACE_TOKENS + PLACES
EXCERPTS, BEFORE, AROUND = 3, 40, 64  # of the largest tokens the neighbours: so many before, so many in all
EXCERPT_FIELDS = 2  # token id (-1: beyond the completion, -2 - id: under the mask), log-ratio
EXCERPT = HISTOGRAM + BINS
TOP = EXCERPT + EXCERPTS * AROUND * EXCERPT_FIELDS
TOP_FIELDS = 5  # policy log-prob, reference log-prob, token id, index in the batch, ENDS and SPECIAL added up
ENDS, SPECIAL = 1, 2  # the last token of its completion; a special token

LARGEST = float(np.finfo(np.float32).max)  # stands for an infinite log-ratio
QUANTILES = (0.5, 0.9, 0.99, 0.999)
SHORT = 0.2  # share of last tokens among all from which on their share of the mass says little
SMALL_PLACE = 0.1  # share of the tokens up to which a bucket counts as a particular place


def row_length(top_k: int) -> int:
    """Return how many numbers a row has."""
    return TOP + TOP_FIELDS * top_k


@dataclass(frozen=True)
class Outlier:
    """One of the tokens with the largest KL of a step.

    `kl` is k3 in nats; `position` counts completion tokens from 0; `row` is the completion's row in its batch, `part`
    the batch (micro-batch), `rank` the process. `sample` names the sample, `prompt` begins its prompt, `text` is the
    token's, where they are known.
    """

    kl: float
    policy_logprob: float
    ref_logprob: float
    token_id: int | None
    position: int
    row: int
    part: int = 0
    rank: int = 0
    sample: str | int | None = None
    prompt: str | None = None
    text: str | None = None

    @property
    def log_ratio(self) -> float:
        """Reference minus policy log-prob, in nats."""
        return self.ref_logprob - self.policy_logprob

    def described(self, prompt: str | None, text: str | None) -> Outlier:
        """Return the same token with prompt and text."""
        place = (self.position, self.row, self.part, self.rank, self.sample)
        return Outlier(self.kl, self.policy_logprob, self.ref_logprob, self.token_id, *place, prompt, text)

    @property
    def completion(self) -> tuple[int, int, int]:
        """Which completion it is in: rank, part, row."""
        return (self.rank, self.part, self.row)

    def to_dict(self) -> dict[str, Any]:
        """Return what is known as plain values, ready for JSON."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Excerpt:
    """A piece of a completion around an outlier.

    `outlier` is its index among the outliers, `start` the position of the first token. `kl` is k3 in nats, None for
    tokens that do not count; `texts` are the tokens', where they are known.
    """

    outlier: int
    start: int
    token_ids: tuple[int, ...]
    kl: tuple[float | None, ...]
    texts: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class TokenStats:
    """KL of one step's tokens. KL in nats; k3 unless named otherwise.

    Attributes
    ----------
    tokens, parts:
        Tokens that counted, and batches (micro-batches, ranks) they came in.
    kl_mean:
        Mean over the parts of each part's token mean.
    kl_token_mean, k1_mean, k2_mean:
        Means over all tokens; k1 = policy minus reference log-prob, k2 half its square.
    kl_max:
        The largest KL of a token; exact.
    log_ratio_max, log_ratio_min:
        Extremes of reference minus policy log-prob, 0 where none is above or below; exact.
    nans, infs:
        Tokens whose KL is NaN, or above what float32 holds. Means are NaN or inf then.
    quantiles:
        By probability. Those among the tokens listed in `outliers` are exact, others within 5 % (and 0 below 1e-12).
    top_share, top_percent_share:
        Share of the KL mass in the 0.1 % and 1 % of the tokens (at least one) with the largest KL. Exact where those
        are among `outliers`, otherwise to about 1 %.
    kl_trimmed:
        Token mean without the top 0.1 % (at least one token, at most those listed).
    end_share:
        Share of the mass on the last token of each completion.
    place_share:
        The largest share of the mass in a bucket of positions that holds at most a tenth of the tokens.
    id_share:
        Share of the mass that the listed tokens of one token id carry, the largest; a lower bound.
    id_of_share:
        That token id.
    padding:
        Tokens of padding that the mask lets through; None where ids of padding were not given.
    places:
        For each bucket of positions: first position, tokens, mass.
    outliers:
        The tokens with the largest KL, the largest first, those with NaN before all.
    excerpts:
        What stands around the first of them, where token ids are known: at most 3 pieces of 64 tokens.
    kl_without_special:
        Token mean without special tokens (end of text, formatting); None where their ids were not given.
    """

    tokens: int
    parts: int
    kl_mean: float
    kl_token_mean: float
    k1_mean: float
    k2_mean: float
    kl_max: float
    log_ratio_max: float
    log_ratio_min: float
    nans: int
    infs: int
    quantiles: Mapping[float, float]
    top_share: float
    top_percent_share: float
    kl_trimmed: float
    end_share: float
    place_share: float
    id_share: float
    id_of_share: int | None
    padding: int | None
    places: tuple[tuple[int, int, float], ...]
    outliers: tuple[Outlier, ...]
    excerpts: tuple[Excerpt, ...] = ()
    kl_without_special: float | None = None

    @property
    def log_ratio_extreme(self) -> float:
        """The largest log-ratio in either direction, in nats."""
        return max(abs(self.log_ratio_max), abs(self.log_ratio_min))

    @property
    def k1_max(self) -> float:
        """The largest k1 of a token."""
        return -self.log_ratio_min

    def read(self) -> TokenStats:
        """Return itself: what is read already can be given where a summary on a device can."""
        return self

    def with_outliers(self, outliers: Sequence[Outlier]) -> TokenStats:
        """Return the same with more known about the outliers."""
        return replace(self, outliers=tuple(outliers))

    def to_dict(self) -> dict[str, Any]:
        """Return the stats as plain values, ready for JSON; without the excerpts, which are long."""
        return {
            **{name: value for name, value in vars(self).items() if name != "excerpts"},
            "quantiles": {str(q): value for q, value in self.quantiles.items()},
            "outliers": [outlier.to_dict() for outlier in self.outliers],
        }


def metrics_of(stats: TokenStats, kl_kind: str = "k3") -> dict[str, float | None]:
    """Return what detectors need of a step's tokens, by the names of an observation."""
    k1 = kl_kind == "k1"
    kl = stats.k1_mean if k1 else stats.k2_mean if kl_kind == "k2" else stats.kl_mean
    completions = stats.places[0][1] if stats.places and stats.places[0][0] == 0 else 0
    long_enough = completions <= SHORT * stats.tokens
    return {
        "kl_mean": kl,
        "kl_max": stats.k1_max if k1 else stats.kl_max,
        "kl_token_mean": stats.kl_token_mean,
        "kl_trimmed": stats.kl_trimmed,
        "k1_mean": stats.k1_mean,
        "k2_mean": stats.k2_mean,
        "log_ratio_extreme": stats.log_ratio_extreme,
        "top_share": stats.top_share,
        "end_share": stats.end_share if long_enough else None,
        "place_share": stats.place_share,
        "id_share": stats.id_share,
        "id_of_share": stats.id_of_share,
        "padding": stats.padding,
    }


def put_together(rows: Array, ranks: Sequence[int] | None = None) -> TokenStats:
    """Return what rows say together, as if their tokens had come in one batch.

    Counts, sums and histograms add, extremes and the top tokens merge.

    Parameters
    ----------
    rows:
        [parts, `row_length(top_k)`]; one row for each batch.
    ranks:
        The process that each row comes from; 0 where None.
    """
    top_k = (rows.shape[1] - TOP) // TOP_FIELDS
    parts = [_Part(row, part, 0 if ranks is None else ranks[part]) for part, row in enumerate(rows)]
    listed = sorted((outlier for part in parts for outlier in part.listed), key=_place_in_list)
    outliers, beyond = tuple(listed[:top_k]), listed[top_k:]
    total = rows.sum(axis=0)
    tokens = int(total[TOKENS])
    with np.errstate(over="ignore"):
        rest = float(total[K3_REST] + np.sum([o.kl for o in beyond]))
        mass = float(rest + np.sum([o.kl for o in outliers]))
    means = [part.mean for part in parts if part.tokens]
    counts = total[HISTOGRAM:EXCERPT].copy()
    counts[0] -= len(listed)  # a row counts those that it lists as 0
    for outlier in beyond:
        counts[_bin_of(outlier.kl)] += 1
    ranked = _Ranked(outliers, counts, rest, mass, tokens)
    highest, lowest = float(rows[:, HIGHEST].max()), float(rows[:, LOWEST].min())
    highest = math.inf if highest >= LARGEST else highest
    few = max(1, math.ceil(tokens / 1000))
    id_share, id_of_share = _id_share(outliers, mass)
    place_mass = np.sum([part.place_mass for part in parts], axis=0)
    places = [
        (2**i - 1, int(n), float(m))
        for i, (n, m) in enumerate(zip(total[PLACE_TOKENS:HISTOGRAM], place_mass, strict=True))
        if n
    ]
    return TokenStats(
        tokens=tokens,
        parts=len(rows),
        kl_mean=float(np.mean(means)) if means else math.nan,
        kl_token_mean=_over(mass, tokens),
        k1_mean=-math.inf if highest == math.inf else _over(-float(total[K1_SUM]), tokens),
        k2_mean=math.inf if highest == math.inf else _over(float(total[SQUARES]) / 2, tokens),
        kl_max=(outliers[0].kl if outliers else 0.0) if tokens else math.nan,
        log_ratio_max=highest if tokens else math.nan,
        log_ratio_min=lowest if tokens else math.nan,
        nans=ranked.nans(),
        infs=ranked.infs(),
        quantiles={q: ranked.quantile(q) for q in QUANTILES},
        top_share=ranked.share(few),
        top_percent_share=ranked.share(max(1, math.ceil(tokens / 100))),
        kl_trimmed=ranked.mean_without(few),
        end_share=_share(sum(part.end_mass for part in parts), mass),
        place_share=max((_share(m, mass) for _, n, m in places if n <= SMALL_PLACE * tokens), default=0.0),
        id_share=id_share,
        id_of_share=id_of_share,
        padding=None if math.isnan(total[PADDING]) else int(total[PADDING]),
        places=tuple(places),
        outliers=outliers,
        excerpts=_excerpts(outliers, parts),
        kl_without_special=_without_special(parts, float(total[PLAIN_TOKENS])),
    )


def _without_special(parts: Sequence[_Part], tokens: float) -> float | None:
    """Return the token mean of what is not special; `tokens` are how many, NaN where that is not known."""
    return None if math.isnan(tokens) else _over(sum(part.plain_mass for part in parts), int(tokens))


def _excerpts(outliers: Sequence[Outlier], parts: Sequence[_Part]) -> tuple[Excerpt, ...]:
    """Return what stands around the first outliers; one that an excerpt shows already gets none of its own."""
    found: list[Excerpt] = []
    for index, outlier in enumerate(outliers):
        shown = any(
            outliers[e.outlier].completion == outlier.completion and 0 <= outlier.position - e.start < len(e)
            for e in found
        )
        excerpt = None if shown else parts[outlier.part].excerpt(outlier, index)
        if excerpt is not None:
            found.append(excerpt)
        if len(found) == EXCERPTS:
            break
    return tuple(found)


def k3(x: float) -> float:
    """Return exp(x) - 1 - x of a log-ratio, without cancellation; inf where it overflows."""
    if math.isnan(x):
        return x
    if abs(x) > 0.5:
        try:
            return math.expm1(x) - x if x < math.inf else x
        except OverflowError:
            return math.inf
    series = 1.0
    for n in range(16, 2, -1):
        series = 1.0 + series * x / n
    return 0.5 * x * x * series


class _Part:
    """One row: its tokens, its mean, and the tokens it lists."""

    def __init__(self, row: Array, part: int, rank: int) -> None:
        self.tokens = int(row[TOKENS])
        width = max(1, int(row[WIDTH]))
        self.listed: list[Outlier] = []
        self.end_mass, self.plain_mass = float(row[END_MASS]), float(row[PLAIN_MASS])
        self.place_mass = row[PLACE_MASS:PLACE_TOKENS].copy()
        self._around: dict[tuple[int, int], Array] = {}  # row and position to what stands there
        around = row[EXCERPT:TOP].reshape(EXCERPTS, AROUND, EXCERPT_FIELDS)
        top = row[TOP:].reshape(-1, TOP_FIELDS).tolist()
        for place_in_list, (policy, reference, token_id, index, marks) in enumerate(top):
            kl = k3(reference - policy)
            if index < 0 or kl == 0:
                continue  # fewer tokens than places in the list; a token without KL is no outlier
            position = int(index) % width
            self.end_mass += kl if int(marks) & ENDS else 0.0
            self.plain_mass += 0.0 if int(marks) & SPECIAL else kl
            self.place_mass[(position + 1).bit_length() - 1] += kl
            known_id = None if token_id < 0 else int(token_id)
            place = (position, int(index) // width, part, rank)
            self.listed.append(Outlier(kl, policy, reference, known_id, *place))
            if place_in_list < EXCERPTS and known_id is not None:
                self._around[place[1], position] = around[place_in_list]
        with np.errstate(over="ignore"):
            self.mean = float(row[K3_REST] + np.sum([o.kl for o in self.listed])) / max(1, self.tokens)

    def excerpt(self, outlier: Outlier, index: int) -> Excerpt | None:
        """Return what stands around an outlier of this part, without what does not count at either end."""
        around = self._around.get((outlier.row, outlier.position))
        if around is None:
            return None
        counted = np.flatnonzero(around[:, 0] >= 0)
        first, last = int(counted[0]), int(counted[-1]) + 1
        ids = around[first:last, 0].astype(int).tolist()
        log_ratios = around[first:last, 1].tolist()
        return Excerpt(
            index,
            outlier.position - BEFORE + first,
            tuple(i if i >= 0 else -2 - i for i in ids),
            tuple(k3(x) if i >= 0 else None for i, x in zip(ids, log_ratios, strict=True)),
        )


def _place_in_list(outlier: Outlier) -> tuple[bool, float, int, int, int]:
    """Order by KL, the largest first, NaN before all."""
    return (not math.isnan(outlier.kl), -outlier.kl, outlier.part, outlier.row, outlier.position)


class _Ranked:
    """All tokens in the order of their KL: the listed ones by value, the others by a histogram."""

    def __init__(self, outliers: Sequence[Outlier], counts: Array, rest: float, mass: float, tokens: int) -> None:
        self._kl = [outlier.kl for outlier in outliers]
        self._counts = counts
        self._rest, self._mass, self._tokens = rest, mass, tokens

    def nans(self) -> int:
        """Return how many tokens have no KL."""
        return int(self._counts[NOT_A_NUMBER:].sum()) + sum(math.isnan(kl) for kl in self._kl)

    def infs(self) -> int:
        """Return how many tokens have a KL that float32 does not hold."""
        return int(self._counts[INFINITE:NOT_A_NUMBER].sum()) + sum(kl > LARGEST for kl in self._kl)

    def quantile(self, q: float) -> float:
        """Return the smallest value that at least a share `q` of the tokens does not exceed."""
        if not self._tokens:
            return math.nan
        from_top = self._tokens - max(1, math.ceil(q * self._tokens))
        if from_top < len(self._kl):
            return self._kl[from_top]
        down = np.cumsum(self._counts[::-1])
        index = BINS - 1 - int(np.searchsorted(down, from_top - len(self._kl), side="right"))
        return float(_MIDDLES[max(0, index)])

    def share(self, count: int) -> float:
        """Return the share of the mass on the `count` tokens with the largest KL."""
        listed = self._kl[:count]
        if count <= len(listed) or math.isinf(self._mass):
            return _share(float(np.sum(listed)), self._mass)
        centres = _CENTRES[::-1]
        counts = np.maximum(self._counts[::-1], 0)
        counts[: BINS - INFINITE] = 0
        everything = float(np.sum(counts * centres))
        if not everything > 0:
            return _share(float(np.sum(listed)), self._mass)
        before = np.cumsum(counts) - counts
        taken = np.clip(count - len(listed) - before, 0, counts)
        more = float(np.sum(taken * centres)) * self._rest / everything
        return _share(float(np.sum(listed)) + more, self._mass)

    def mean_without(self, count: int) -> float:
        """Return the token mean without the `count` tokens with the largest KL, of which no more than listed go."""
        cut = min(count, len(self._kl))
        if self._tokens <= count:
            return math.nan
        return (self._rest + float(np.sum(self._kl[cut:]))) / (self._tokens - cut)


def _edges() -> Array:
    """Return the lower edges of the bins, and the upper one of the last finite bin."""
    bits = np.arange(LOWEST_BIN, 255 * BINS_PER_OCTAVE, dtype=np.uint32) << np.uint32(23 - 3)
    lower = bits.view(np.float32).astype(np.float64)
    return np.concatenate([[0.0], lower, [2.0**128], np.full(BINS - len(lower) - 1, math.inf)])


_EDGES = _edges()
_CENTRES = np.where(np.isfinite(_EDGES[1:]), (_EDGES[:-1] + np.where(np.isfinite(_EDGES[1:]), _EDGES[1:], 0)) / 2, 0.0)
_MIDDLES = np.concatenate([[0.0], np.sqrt(_EDGES[1:-1] * _EDGES[2:])])
_MIDDLES[NOT_A_NUMBER:] = math.nan


def _bin_of(kl: float) -> int:
    with np.errstate(over="ignore"):
        bits = int(np.float32(kl).view(np.uint32))
    return max(0, ((bits >> 20) & 2047) - LOWEST_BIN + 1)


def _id_share(outliers: Sequence[Outlier], mass: float) -> tuple[float, int | None]:
    by_id: defaultdict[int, float] = defaultdict(float)
    for outlier in outliers:
        if outlier.token_id is not None and math.isfinite(outlier.kl):
            by_id[outlier.token_id] += outlier.kl
    if not by_id:
        return 0.0, None
    token_id = max(by_id, key=by_id.__getitem__)
    return _share(by_id[token_id], mass), token_id


def _share(part: float, whole: float) -> float:
    """Return a share: 0 of nothing, all of it where both are infinite."""
    if whole == 0:
        return 0.0
    return 1.0 if math.isinf(part) and math.isinf(whole) else part / whole


def _over(total: float, count: int) -> float:
    return total / count if count else math.nan
