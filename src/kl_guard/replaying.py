"""The guard over a finished run, to see when it should have been stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.findings import Decision, Finding
from kl_guard.guard import KLGuard
from kl_guard.history import History
from kl_guard.logs import open_log
from kl_guard.logs.text import Notes
from kl_guard.reading import KLSource
from kl_guard.series import Series, from_log, from_rows

logger = logging.getLogger("kl_guard")

FEW = 3  # a run may have been resumed so often, however short it is


@dataclass(frozen=True)
class ReplayResult:
    """What the guard would have said about a finished run.

    `decision` is the first that was not "continue" (or "continue"); `fired_at` its step, `onset_step` and
    `departure_step` those of the finding that decided; None where nothing did. `findings` are all, also those after the
    decision. `observations` counts the steps that were read, `notes` say what was peculiar about the log, `source` says
    which KL was read, of which kind, and which others there are; None where there was none.
    """

    findings: tuple[Finding, ...]
    decision: Decision
    observations: int
    notes: tuple[str, ...] = ()
    source: KLSource | None = None

    @property
    def fired_at(self) -> int | None:
        """Step of the decision."""
        return self.decision.reason.step if self.decision.reason else None

    @property
    def onset_step(self) -> int | None:
        """Onset of the finding that decided."""
        return self.decision.reason.onset_step if self.decision.reason else None

    @property
    def departure_step(self) -> int | None:
        """Departure of the finding that decided."""
        return self.decision.reason.departure_step if self.decision.reason else None


Source = str | os.PathLike[str] | Iterable[float | None] | Iterable[Mapping[str, Any]]


def replay(
    source: Source, config: GuardConfig | None = None, *, key: str | None = None, **overrides: Any
) -> ReplayResult:
    """Run the guard over a finished run; no files are written, and no finding is logged.

    Where steps go back, the run had been resumed: what came after is dropped, as it was in the run. The kind of KL and
    whether it is rounded are those of the log, unless the config says otherwise.

    Parameters
    ----------
    source:
        KL numbers (steps 1, 2, ...; None for a missing one), or rows with `step`, `kl_mean` (or what a trainer calls
        it) and whatever else the log had, or the path of a log: `trainer_state.json` or a folder with checkpoints, CSV,
        JSON lines, console text, TensorBoard events, the guard's own journal (see `kl_guard.logs.read_rows`).
    config, overrides:
        The knobs, as a `GuardConfig` or by name.
    key:
        Which KL to read, by its name in the log. Where None, KL to the reference is preferred; `source` of the result
        says which was taken.

    Raises
    ------
    ValueError
        For a row that cannot be read; the message has its number, and for a file path and line. For a file that holds
        no KL, a `key` that is not there, and rows that are not in the order of their steps.
    OSError
        If the file cannot be opened.

    Examples
    --------
    >>> result = replay([0.02] * 40 + [0.02 * 1.6**k for k in range(20)])
    >>> result.fired_at, result.onset_step, result.departure_step
    (51, 48, 41)
    """
    built = GuardConfig.build(config, **overrides)
    series = _series(source, key)
    result, _ = judged(series, built, overrides)
    for note in series.notes:
        logger.warning("kl-guard: %s", note)
    return result


def judged(series: Series, config: GuardConfig, overrides: Mapping[str, Any]) -> tuple[ReplayResult, History]:
    """Return what the guard says of a series, and the observations that it has judged.

    `overrides` are the knobs of the config that were given by name: what the log says does not replace them.
    """
    built = GuardConfig.build(config, **_told(series, config, overrides))
    steps = iter(series)
    first = list(islice(steps, 4 * built.warmup + 1))  # as many as it takes to see whether the run is short
    guard = KLGuard(built, rank=0, expected_observations=len(first), announce=False, alerts=())
    findings: list[Finding] = []
    decision = Decision()
    notes = Notes()
    read = 0
    for number, observation in chain(first, steps):
        read += 1
        last = guard.history.steps[-1] if len(guard.history) else None
        if last is not None and observation.step < last:
            notes.add("back", f"row {number}: steps go back from {last} to {observation.step}, read as a resume")
            guard.resumed(observation.step - 1 if observation.step else 0)
        answer = guard.take(observation)
        findings += answer.findings
        decision = answer if answer and not decision else decision
    back, lost = notes.count("back"), read - len(guard.history)
    if back > max(FEW, read // 4) or (back > max(FEW - 1, read // 20) and lost > read // 2):
        raise ValueError(f"{series.place}steps go back in {back} of {read} rows: sort them, the first step first")
    source = _as_read(series.source, built)
    return ReplayResult(
        tuple(findings), decision, len(guard.history), (*series.notes, *notes.texts), source
    ), guard.history


def _series(source: Source, key: str | None) -> Series:
    if isinstance(source, (str, os.PathLike)):
        return from_log(open_log(source), key)
    return from_rows(_rows(source), key)


def _rows(source: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield rows; bare numbers are KLs."""
    return (row if isinstance(row, Mapping) else {"kl_mean": row} for row in source)


def _told(series: Series, config: GuardConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the log tells about its KL, where the user has not said it."""
    told: dict[str, Any] = {}
    default = GuardConfig()
    kind = series.source.kind if series.source else None
    if kind is not None and "kl_kind" not in overrides and config.kl_kind == default.kl_kind:
        told["kl_kind"] = kind
    if series.rounded and "rounded" not in overrides:
        told["rounded"] = True
    return told


def _as_read(source: KLSource | None, config: GuardConfig) -> KLSource | None:
    """Return the source with the kind that the guard went by."""
    return source and KLSource(source.name, config.kl_kind, source.others, source.framework)
