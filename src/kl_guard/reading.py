"""Metrics of a trainer, by its own names, as the values of an observation: one KL is chosen and kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kl_guard.config import KLKind
from kl_guard.names import BESIDE, BY_NAME, FIELDS, KL_NAMES, RANKS, STEPS, KLName, meaning, split
from kl_guard.observation import as_number, shown

MANY = 10_000  # names that are remembered: a trainer may give each step's metrics names of their own
LISTED = 40  # names that a message has
CLOCKS = ("train_runtime", "_runtime", "runtime")  # names of the seconds since the start of a run
ROUNDING = -1e-6  # a KL below this is no k3, whatever rounding did


@dataclass(frozen=True)
class KLSource:
    """Which KL is read: its name as logged, its kind (None where the table does not know it), and the other KLs."""

    name: str
    kind: KLKind | None
    others: tuple[str, ...] = ()
    framework: str = ""

    def __str__(self) -> str:
        others = f"; other KLs there: {', '.join(map(shown, self.others))}" if self.others else ""
        return f"KL is read from {shown(repr(self.name))} ({self.kind or 'of unknown kind'}){others}"


class MetricReader:
    """Reads rows of one log, or dictionaries of one running trainer.

    Show it some rows with `look`, then `choose`: the KL to watch is settled from them, once, and so is each other
    metric when it is first seen.

    Parameters
    ----------
    key:
        The name of the KL as logged, where the table shall not decide.

    Examples
    --------
    >>> reader = MetricReader()
    >>> row = {"actor/ppo_kl": 0.001, "actor/kl_loss": 0.02, "actor/lr": 1e-6, "timing/gen": 40.0}
    >>> reader.look(row)
    True
    >>> reader.choose().kind, reader.values(row)
    ('k3', {'kl_mean': 0.02, 'learning_rate': 1e-06})
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.source: KLSource | None = None
        self.lowest = math.inf
        self.clocks: list[str] = []  # names seen that say how long the run has taken
        self._names: dict[str, tuple[str, str]] = {}
        self._beside: dict[str, set[str]] = {}
        self._finite: dict[str, int] = {}
        self._lowest: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._bound: dict[str, str] = {}
        self._unbound: list[str] = []
        self._run = ""
        self._maximum: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source or self.key!r})"

    @property
    def names(self) -> list[str]:
        """All names seen, as logged."""
        return list(self._names)

    def look(self, row: Mapping[str, Any]) -> bool:
        """Take in the names of a row and which KLs it has; return whether it has one."""
        if not row.keys() <= self._names.keys():
            self._learn(row)
        found = False
        for key in row.keys() & self._finite.keys():  # as long as the shorter of the two
            found = True
            number = _finite(row[key])
            if number is not None:
                self._finite[key] += 1
                self._lowest[key] = min(self._lowest[key], number)
        if found:
            for key in self._steps:
                self._steps[key] += key in row
        return found

    def says_something(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row that was looked at has a metric of training at all."""
        return any(self._names[key][1] in FIELDS for key in row)

    def choose(self) -> KLSource | None:
        """Settle which KL is read, from the rows seen; None where there is none.

        The best kind wins, then the name with the most finite values, then the order of the table.

        Raises
        ------
        ValueError
            When `key` was given and no row has it; the message has the names that there are.
        """
        entries = {key: entry for key in self._finite if (entry := self._entry(key)) is not None}
        if self.key is not None:
            if self.key not in self._names:
                there = ", ".join(map(shown, sorted(self._names)[:LISTED])) or "no names"
                raise ValueError(f"there is no {shown(repr(self.key))}; there are: {there}")
            chosen = self.key
        else:
            ranked = sorted(
                (RANKS[entry.kind], -self._finite[key], KL_NAMES.index(entry), len(key), key)
                for key, entry in entries.items()
                if entry.kind is not None
            )
            if not ranked:
                return None
            chosen = ranked[0][-1]
        entry = entries.get(chosen)
        self._run = self._names[chosen][0]
        self._maximum = entry.maximum if entry else None
        self._bound["kl_mean"] = chosen
        self.lowest = self._lowest.get(chosen, math.inf)
        others = tuple(sorted(key for key in entries if key != chosen))
        self.source = KLSource(chosen, entry.kind if entry else None, others, entry.framework if entry else "")
        self._unbound = list(self._names)
        self._bind()
        return self.source

    def step_key(self) -> str | None:
        """Return the name of the step in rows that have a KL; None where no name known is there."""
        most = max(self._steps.values(), default=0)
        if not most:
            return None
        return min((key for key, n in self._steps.items() if n == most), key=lambda k: STEPS.index(_step_name(k)))

    def values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a row has, by the names of an observation; empty for one that says nothing of training."""
        if not row.keys() <= self._names.keys():
            self._learn(row)
        if self._unbound:
            self._bind()
        return {field: row[key] for field, key in self._bound.items() if key in row}

    def name_of(self, field: str) -> str:
        """Return how a metric is called in the log."""
        return self._bound.get(field, field)

    def _entry(self, key: str) -> KLName | None:
        run, name = self._names[key]
        return meaning(name, self._beside.get("", set()) | self._beside.get(run, set()))

    def _learn(self, row: Mapping[str, Any]) -> None:
        if len(self._names) > MANY:
            self._forget()
        new = [key for key in row if key not in self._names]
        for key in new:
            self._names[key] = of_run = split(str(key))
            run, name = of_run
            if name in BESIDE:
                self._beside.setdefault(run, set()).add(name)
            if name in BY_NAME or key == self.key:
                self._finite[key], self._lowest[key] = 0, math.inf
            if _step_name(str(key)) in STEPS:
                self._steps[key] = 0
            if key in CLOCKS and key not in self.clocks:
                self.clocks.append(key)
        self._unbound += new

    def _forget(self) -> None:
        """Forget names that nothing can be read from."""
        known = {*self._bound.values(), *self._finite, *self._steps}
        self._names = {
            key: (run, name)
            for key, (run, name) in self._names.items()
            if key in known or (name in FIELDS and run in ("", self._run))
        }
        self._unbound = [key for key in self._unbound if key in self._names]

    def _bind(self) -> None:
        """Settle what the new names are read as, the better ones first."""
        for key in sorted(self._unbound, key=lambda key: FIELDS.get(self._names[key][1], ("", 0))[1]):
            run, name = self._names[key]
            if run not in ("", self._run):
                continue
            field = "kl_max" if name == self._maximum else FIELDS.get(name, (None,))[0]
            if field is not None and key != self.key:
                self._bound.setdefault(field, key)
        self._unbound = []


def seconds_in(row: Mapping[str, Any], clock: str) -> float:
    """Return how long a run had taken by a row, 0.0 where it does not say."""
    number = _finite(row.get(clock))
    return 0.0 if number is None else max(0.0, number)


def _step_name(key: str) -> str:
    return key.rpartition(" - ")[2]


def _finite(value: Any) -> float | None:
    try:
        number = as_number("", value)
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None
