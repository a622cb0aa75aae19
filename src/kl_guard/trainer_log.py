"""What a trainer in this process logs, by its own names: one KL is chosen at the first log that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kl_guard.names import STEPS
from kl_guard.observation import shown
from kl_guard.reading import KLSource, MetricReader


@dataclass(frozen=True, slots=True)
class Logged:
    """One log as an observation: the step as logged or given, and the values by the names in `METRICS`."""

    step: Any
    values: dict[str, Any]


class TrainerLog:
    """Reads one dictionary of metrics after the other; the choice of the KL is kept for the run.

    Parameters
    ----------
    warn:
        Called with a key and a text, for what is to be said once.
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._reader = MetricReader()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._reader.source})"

    @property
    def source(self) -> KLSource | None:
        """Which KL is read; None as long as none was logged."""
        return self._reader.source

    def read(self, metrics: Any, step: Any, key: str | None, last_step: int) -> Logged | None:
        """Return what a log says of training; None where it says nothing of it, as the log of an evaluation."""
        if not isinstance(metrics, Mapping):
            self._warn("log", f"a log is left out: metrics must be a dictionary, got {type(metrics).__name__}")
            return None
        row = {name: value for name, value in metrics.items() if isinstance(name, str)}
        self._take_key(key)
        if self.source is None and self._reader.look(row):
            self._choose()
        values = self._reader.values(row)
        if not values:
            return None
        if step is None:
            step = next((row[name] for name in STEPS if name in row), last_step + 1)
        if isinstance(step, str):
            step = step.partition("/")[0]
        return Logged(step, values)

    def _take_key(self, key: str | None) -> None:
        if key is None or key == self._reader.key:
            return
        if self.source is None:
            self._reader = MetricReader(key)
        else:
            self._warn(
                "key", f"key={shown(repr(key))} comes too late: KL is read from {shown(repr(self.source.name))} already"
            )

    def _choose(self) -> None:
        try:
            source = self._reader.choose()
        except ValueError as error:
            self._warn("key", f"no KL is read: {error}")
            return
        if source is not None:
            self._warn("source", f"{source}; key takes another, kl_kind says which kind it is")
