"""What there is to tell about a run, gathered from the guard's own files."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_guard._version import __version__
from kl_guard.findings import Checkpoint, Finding
from kl_guard.history import History
from kl_guard.journal import read_journal
from kl_guard.lines import JsonLines
from kl_guard.memory import recall
from kl_guard.outliers import OutlierLedger
from kl_guard.token_keeper import NAME as TOKENS
from kl_guard.token_stats import Outlier


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: its observations up to its end, and to which step the run then went back."""

    number: int
    history: History
    back_to: int | None = None


@dataclass
class Story:
    """Everything that a report shows.

    `reason` is the finding that it is about, None where nothing acted; `action` what was decided then, `note` why it
    is not what was configured; `target` the checkpoint to go back to.
    """

    title: str
    history: History
    findings: Sequence[Finding]
    reason: Finding | None = None
    action: str = "continue"
    note: str = ""
    target: int | None = None
    attempts: Sequence[Attempt] = ()
    checkpoints: Sequence[Checkpoint] = ()
    pinned: frozenset[int] = frozenset()
    outliers: Sequence[Outlier] = ()
    outliers_at: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=lambda: {"kl_guard": __version__, "Python": _python()})
    notes: Sequence[str] = ()


def story_of(folder: Path) -> Story:
    """Return the story of a run from the guard's folder (`<output_dir>/kl_guard`), as it stands.

    Raises
    ------
    FileNotFoundError
        If there is no journal.
    OSError
        If it cannot be read.
    """
    records, notes = read_journal(folder / "journal.jsonl")
    memory = recall(records)
    told = [record for record in records if record["type"] == "decision"]
    last = told[-1] if told else {}
    reason = _reason(records, last)
    ledger = OutlierLedger()
    ledger.recall(JsonLines(folder / TOKENS).tail())
    outliers, outliers_at = _outliers(ledger, reason)
    run: Mapping[str, Any] = next((record for record in reversed(records) if record["type"] == "run"), {})
    config = run.get("config")
    return Story(
        title=str(folder.parent),
        history=memory.history,
        findings=[Finding.from_dict(r["finding"]) for r in records if r["type"] == "finding"],
        reason=reason,
        action=str(last.get("action", "continue")),
        note=str(last.get("note") or ""),
        target=last.get("to_step"),
        attempts=_attempts(records),
        checkpoints=sorted(memory.checkpoints.values(), key=lambda checkpoint: checkpoint.step),
        pinned=frozenset(_pins(folder / "pins")),
        outliers=outliers,
        outliers_at=outliers_at,
        config=config if isinstance(config, Mapping) else {},
        notes=notes,
    )


def _reason(records: Iterable[Mapping[str, Any]], decision: Mapping[str, Any]) -> Finding | None:
    """Return the finding that a decision rests on."""
    reason = None
    for record in records:
        if record["type"] == "finding":
            finding = record["finding"]
            if (finding["signature"], finding["step"]) == (decision.get("signature"), decision.get("step")):
                reason = Finding.from_dict(finding)
    return reason


def _attempts(records: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Return the attempts before the present one, each with all that it had observed."""
    attempts: list[Attempt] = []
    for index, record in enumerate(records):
        if record["type"] == "rollback":
            before = recall(records[:index])
            attempts.append(Attempt(before.attempt, before.history, int(record["to_step"])))
    return attempts


def _pins(folder: Path) -> Iterable[int]:
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*")) if folder.is_dir() else ()
    return [int(name) for name in names if name.isdigit()]


def _outliers(ledger: OutlierLedger, reason: Finding | None) -> tuple[tuple[Outlier, ...], int | None]:
    """Return the outlier tokens of the step of the alarm, or the last that has any, and that step."""
    if reason is not None and ledger.at(reason.step):
        return ledger.at(reason.step), reason.step
    step = ledger.last_step
    return (ledger.at(step), step) if step is not None else ((), None)


def _python() -> str:
    return platform.python_version()
