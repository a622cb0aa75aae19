"""A recorded run as a series of observations: one KL of one kind, one observation a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, count
from typing import Any

from kl_guard.config import KLKind
from kl_guard.logs import Log
from kl_guard.logs.tally import Tally
from kl_guard.logs.text import EVERY, Notes
from kl_guard.observation import Observation, as_number
from kl_guard.progress import Told
from kl_guard.reading import ROUNDING, KLSource, MetricReader, seconds_in

LOOK = 1_000  # rows with a KL from which it is chosen
HELD = 50_000  # rows that are held until then; where KL is rarer, the log is read a second time
LONGEST_NUMBER = 400  # characters
DECIMALS = 4  # after the point; a log that never shows more is taken for rounded
_PRINTED_EXACTLY = frozenset({"loss", "learning_rate", "beta"})  # or rounded where the others are not

Row = Mapping[str, Any]


class Series:
    """Observations from rows: names are the trainer's own, parts of a step are put together, evaluations left out.

    Iterating yields the number of the row that completed an observation, and the observation. `source`, `rounded` and
    `notes` say what was read. A log is read once: the rows that it takes to choose the KL are held until then.

    Parameters
    ----------
    rows:
        Gives the rows, from the beginning at each call.
    key:
        Name of the KL, where it shall not be chosen.
    log:
        The log that the rows come from, None where they are in memory.

    Raises
    ------
    ValueError
        When a log has no KL, or nothing by the name of `key`.
    """

    def __init__(self, rows: Callable[[], Iterable[Row]], key: str | None = None, log: Log | None = None) -> None:
        self._rows = rows
        self._log = log
        self._reader = MetricReader(key)
        self._notes: list[str] = []
        self._begun: Iterator[tuple[str, Row]] | None = None
        self._held: list[tuple[int, Observation]] | None = None
        self.on_share: Told | None = None  # is told which share of what is held was gone through
        self._seconds = 0.0
        sample, looked = self._sample()
        try:
            source = self._reader.choose()
        except ValueError as error:
            raise ValueError(f"{log.path}: {error}" if log else str(error)) from error
        if source is None and log is not None:
            raise ValueError(f"{log.path}: {log.without_kl(sorted(self._reader.names)[:40])}")
        self._step_key = self._reader.step_key() or ("step" if log is None else None)
        self._sparse = log is not None and len(sample) < looked / 2
        self.rounded = log is not None and (log.rounded or (log.may_round and self._looks_rounded(sample)))
        self.source = self._settled(source)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"

    @property
    def notes(self) -> list[str]:
        """What was peculiar; complete when all was read."""
        return (self._log.notes.texts if self._log else []) + self._notes

    @property
    def place(self) -> str:
        """Where it comes from, to begin a message with."""
        return f"{self._log.path}: " if self._log else ""

    @property
    def seconds(self) -> float | None:
        """How long the run took by its log, in seconds; None where it does not say, complete when all was read."""
        longest = max(self._seconds, self._log.seconds if self._log else 0.0)
        return longest if longest > 0 else None

    def hold(self) -> None:
        """Read everything now, and keep it for iterating more than once."""
        self._held = list(self)

    def __iter__(self) -> Iterator[tuple[int, Observation]]:
        return self._completed() if self._held is None else self._again(self._held)

    def _again(self, held: list[tuple[int, Observation]]) -> Iterator[tuple[int, Observation]]:
        for index, one in enumerate(held):
            if self.on_share is not None and not index % EVERY:
                self.on_share(index / len(held))
            yield one

    def _completed(self) -> Iterator[tuple[int, Observation]]:
        waiting: Observation | None = None
        number = 0
        for number, observation in self._read():
            if waiting is None:
                waiting = observation
            elif observation.step == waiting.step:
                waiting = waiting.merged(observation)
            else:
                yield number - 1, waiting
                waiting = observation
        if waiting is not None:
            yield number, waiting

    def _sample(self) -> tuple[list[Row], int]:
        """Look at rows until enough have a KL; return those, and how many said anything of training."""
        sample: list[Row] = []
        looked = 0
        rows = self._placed()
        held: list[tuple[str, Row]] | None = []
        for placed in rows:
            row = placed[1]
            if held is not None:
                held.append(placed)
                held = held if len(held) <= HELD else None
            has_kl = self._reader.look(row)
            looked += has_kl or bool(self._reader.says_something(row))
            if has_kl:
                sample.append(row)
                if len(sample) == LOOK:
                    break
        self._begun = None if held is None else chain(_let_go(held), rows)
        return sample, looked

    def _placed(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows from the beginning, each with its place for messages."""
        log = self._log
        if log is None:
            return (("", row) for row in self._rows())
        return ((log.place, row) for row in self._rows())

    def _settled(self, source: KLSource | None) -> KLSource | None:
        """Return the source with the kind that the log or its values tell better than the name."""
        kind: KLKind | None = self._log.kind if self._log else None
        if source is None or kind is not None:
            return source and replace(source, kind=kind)
        if source.kind == "k3" and source.framework.startswith("TRL GRPO") and self._reader.lowest < ROUNDING:
            self._notes.append(
                f"{source.name!r} falls to {self._reader.lowest:.3g}, which no k3 does: read as k1, as RLOO logs it "
                "(kl_kind='k3' if it is not)"
            )
            return replace(source, kind="k1", framework="TRL RLOO")
        return source

    def _looks_rounded(self, sample: list[Row]) -> bool:
        shown = (
            str(value)
            for row in sample
            for field, value in self._reader.values(row).items()
            if field not in _PRINTED_EXACTLY and isinstance(value, (float, str))
        )
        return not any("e" in text or len(text.partition(".")[2]) > DECIMALS for text in shown if text != "None")

    def _read(self) -> Iterator[tuple[int, Observation]]:
        values_of, key, log = self._reader.values, self._step_key, self._log
        none_is_nan = log is not None and log.none_is_nan
        carried: dict[str, Any] = {}
        stepless = 0
        numbers = count(1)
        rows, self._begun = self._begun or self._placed(), None
        clocks = self._reader.clocks
        tally = Tally(Notes() if log is None else log.notes, "value")
        for place, (where, row) in enumerate(rows, start=1):
            values = values_of(row)
            for clock in clocks:
                self._seconds = max(self._seconds, seconds_in(row, clock))
            if not values:
                continue
            if self._sparse:
                carried.update(values)
                if "kl_mean" not in values:
                    continue
                values, carried = carried, {}
            number = next(numbers) if log is not None else place
            step = row.get(key) if key is not None else None
            if step is None and key is not None and log is not None:
                stepless += 1
                continue
            if none_is_nan and "kl_mean" in values and values["kl_mean"] is None:
                values["kl_mean"] = float("nan")
            try:
                yield place, self._observation(values, number if step is None else step, row.get("window") or 1)
            except ValueError as error:
                if log is None:
                    raise ValueError(f"row {place}: {error}") from error
                tally.bad(f"{where}row {place}: {error}")
            else:
                tally.good += 1
        tally.settle()
        if log is not None and key is None:
            self._note("the log has no steps: they are counted, one for each row")
        if stepless:
            self._note(f"{stepless} rows without {key!r} are left out")
        if self._sparse:
            self._note("KL is in fewer than half of the rows: what others say counts for the next that has it")

    def _observation(self, values: dict[str, Any], step: Any, window: Any) -> Observation:
        for field, value in values.items():
            if type(value) is not float:
                if isinstance(value, str) and len(value) > LONGEST_NUMBER:
                    value = value[:LONGEST_NUMBER] + " and so on"
                values[field] = as_number(self._reader.name_of(field), value)
        if isinstance(step, str):
            step = step.partition("/")[0]
        return Observation.at(step, window, values)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _let_go(held: list[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Yield what is held, each row for the last time."""
    held.reverse()
    while held:
        yield held.pop()


def from_rows(rows: Iterable[Row], key: str | None = None) -> Series:
    """Return the series of rows in memory."""
    held = list(rows)
    return Series(lambda: held, key)


def from_log(log: Log, key: str | None = None) -> Series:
    """Return the series of a log, which is read as it goes.

    Raises
    ------
    ValueError
        When it cannot be read or has no KL; the message has the path.
    """
    return Series(log.rows, key, log)
