"""Which tokens have carried the KL over a run, and where."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kl_guard.token_stats import Outlier, TokenStats

STEPS = 64  # whose outliers are kept
LOOKS = 3  # steps of which most must say that few completions carry the KL
MANY = 32  # completions among which a few can be told
FEW = 50  # one completion in so many
LISTED = 8  # outliers that must lie in them, each of at least a nat
DOMINATED = 0.5  # share of the mean that nine tokens of ten lie below
NAMES = frozenset(field.name for field in fields(Outlier))


@dataclass(frozen=True)
class Repeated:
    """A token id that keeps coming back among the outliers.

    `steps` counts the steps it was among them, `kl` is the sum over its occurrences, `worst` the largest of them.
    """

    token_id: int
    steps: int
    kl: float
    worst: Outlier


@dataclass(frozen=True)
class FewCompletions:
    """A few completions that carry the KL of a step: which, as rank, part and row, and of how many."""

    places: frozenset[tuple[int, int, int]]
    among: int

    def __str__(self) -> str:
        return f"{len(self.places)} of {self.among} completions"


class OutlierLedger:
    """The tokens with the largest KL of the last 64 steps.

    Examples
    --------
    >>> ledger = OutlierLedger()
    >>> ledger.add(1, [Outlier(9.0, -9.0, -1.0, token_id=7, position=3, row=0)])
    >>> ledger.add(2, [Outlier(4.0, -5.0, -1.0, token_id=7, position=4, row=0)])
    >>> [(repeated.token_id, repeated.steps, repeated.worst.kl) for repeated in ledger.ids()]
    [(7, 2, 9.0)]
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, tuple[Outlier, ...]]] = deque(maxlen=STEPS)
        self.latest: TokenStats | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(steps={len(self._steps)})"

    def __len__(self) -> int:
        return len(self._steps)

    def update(self, step: int, stats: TokenStats) -> None:
        """Take in a step's tokens."""
        self.latest = stats
        self.add(step, stats.outliers)

    def add(self, step: int, outliers: Iterable[Outlier]) -> None:
        """Take in a step's outliers; told again, a step is replaced."""
        if self._steps and self._steps[-1][0] == step:
            self._steps.pop()
        self._steps.append((step, tuple(outliers)))

    @property
    def last_step(self) -> int | None:
        """The last step whose outliers are kept."""
        return self._steps[-1][0] if self._steps else None

    def at(self, step: int) -> tuple[Outlier, ...]:
        """Return the outliers of a step, the largest first."""
        return next((outliers for s, outliers in self._steps if s == step), ())

    def ids(self) -> list[Repeated]:
        """Return the token ids by how many steps they were among the outliers of, then by their KL."""
        seen: dict[int, list[tuple[int, Outlier]]] = {}
        for step, outliers in self._steps:
            for outlier in outliers:
                if outlier.token_id is not None:
                    seen.setdefault(outlier.token_id, []).append((step, outlier))
        repeated = [
            Repeated(
                token_id,
                len({step for step, _ in found}),
                sum(outlier.kl for _, outlier in found),
                max((outlier for _, outlier in found), key=lambda outlier: outlier.kl),
            )
            for token_id, found in seen.items()
        ]
        return sorted(repeated, key=lambda r: (-r.steps, -r.kl))

    def few_completions(self) -> FewCompletions | None:
        """Return the completions that carry the KL alone, at most 2 % of them, in most of the last steps; else None.

        That is the case where all outliers lie in them and nine tokens of ten have far less KL than the mean. What is
        wrong is shared by all tokens of such a completion, as when ids are shifted by one (eval-protocol issue 457).
        """
        latest = self.latest
        if latest is None or not latest.places or latest.places[0][0] != 0 or latest.places[0][1] < MANY:
            return None
        if not latest.quantiles[0.9] < DOMINATED * latest.kl_token_mean:
            return None
        among, found = latest.places[0][1], [_completions(outliers) for _, outliers in list(self._steps)[-LOOKS:]]
        few = [places for places in found if places and len(places) <= max(1, among // FEW)]
        return FewCompletions(few[-1], among) if found[-1] in few and 2 * len(few) > len(found) else None

    def go_back(self, step: int) -> None:
        """Forget what came after `step`."""
        while self._steps and self._steps[-1][0] > step:
            self._steps.pop()
            self.latest = None

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take over what a file of earlier steps says; records that make no sense are left out."""
        for record in records:
            try:
                step = int(record["step"])
                outliers = [outlier_of(one) for one in record["outliers"]]
            except (AttributeError, KeyError, TypeError, ValueError):
                continue
            self.go_back(step)
            self.add(step, outliers)


def _completions(outliers: Iterable[Outlier]) -> frozenset[tuple[int, int, int]]:
    """Return where the outliers of a step lie; nowhere where they are few or small."""
    large = [outlier.completion for outlier in outliers if outlier.kl >= 1]
    return frozenset(large) if len(large) >= LISTED else frozenset()


def outlier_of(record: Mapping[str, Any]) -> Outlier:
    """Rebuild an outlier that `to_dict` returned.

    Raises
    ------
    AttributeError, KeyError, TypeError, ValueError
        For what is none.
    """
    known = {name: value for name, value in record.items() if name in NAMES}
    return Outlier(**known | {name: float(known[name]) for name in ("kl", "policy_logprob", "ref_logprob")})
