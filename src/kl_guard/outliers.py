"""Which tokens have carried the KL over a run, and where."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kl_guard.token_stats import Outlier, TokenStats

STEPS = 64  # whose outliers are kept
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


def outlier_of(record: Mapping[str, Any]) -> Outlier:
    """Rebuild an outlier that `to_dict` returned.

    Raises
    ------
    AttributeError, KeyError, TypeError, ValueError
        For what is none.
    """
    known = {name: value for name, value in record.items() if name in NAMES}
    return Outlier(**known | {name: float(known[name]) for name in ("kl", "policy_logprob", "ref_logprob")})
