"""The guard over a finished run, to see when it should have been stopped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.findings import Decision, Finding
from kl_guard.guard import KLGuard
from kl_guard.logs import read_rows
from kl_guard.observation import Observation


@dataclass(frozen=True)
class ReplayResult:
    """What the guard would have said about a finished run.

    `decision` is the first that was not "continue" (or "continue"); `fired_at` its step, `onset_step` and
    `departure_step` those of the finding that decided; None where nothing did. `findings` are all, also those after the
    decision. `observations` counts the steps that were read, `notes` say what was peculiar about the log.
    """

    findings: tuple[Finding, ...]
    decision: Decision
    observations: int
    notes: tuple[str, ...] = ()

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


def replay(source: Source, config: GuardConfig | None = None, **overrides: Any) -> ReplayResult:
    """Run the guard over a finished run; no files are written, and no finding is logged.

    Where steps go back, the run had been resumed: what came after is dropped, as it was in the run.

    Parameters
    ----------
    source:
        KL numbers (steps 1, 2, ...; None for a missing one), or rows with `step`, `kl_mean` (or `kl`) and whatever else
        the log had, or the path of a log: `trainer_state.json`, CSV, JSON lines, or the guard's own journal.
    config, overrides:
        The knobs, as a `GuardConfig` or by name.

    Raises
    ------
    ValueError
        For a row that cannot be read; the message has its number. For a file that holds no KL.
    OSError
        If the file cannot be opened.

    Examples
    --------
    >>> result = replay([0.02] * 40 + [0.02 * 1.6**k for k in range(20)])
    >>> result.fired_at, result.onset_step, result.departure_step
    (51, 48, 41)
    """
    rows = list(read_rows(source)) if isinstance(source, (str, os.PathLike)) else list(source)
    findings: list[Finding] = []
    notes: list[str] = []
    guard = KLGuard(GuardConfig.build(config, **overrides), rank=0, expected_observations=len(rows), announce=False)
    decision = Decision()
    for number, row in enumerate(rows, start=1):
        observation = _read(row, number)
        last = guard.history.steps[-1] if len(guard.history) else None
        if last is not None and observation.step < last:
            notes.append(f"row {number}: steps go back from {last} to {observation.step}, read as a resume")
            guard.resumed(observation.step - 1 if observation.step else 0)
        answer = guard.take(observation)
        findings += answer.findings
        decision = answer if answer and not decision else decision
    return ReplayResult(tuple(findings), decision, len(guard.history), tuple(notes))


def _read(row: Any, number: int) -> Observation:
    """Return one row as an observation."""
    fields = row if isinstance(row, Mapping) else {"kl_mean": row}
    step = fields.get("step")
    try:
        return Observation.from_mapping(fields, number if step is None else step, fields.get("window") or 1)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from error
