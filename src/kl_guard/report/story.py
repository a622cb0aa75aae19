"""What there is to tell about a run, gathered from the guard's own files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_guard.findings import Checkpoint, Finding
from kl_guard.history import History
from kl_guard.incidents import Tokens, folder_of, tokens_in
from kl_guard.journal import read_journal
from kl_guard.lines import JsonLines
from kl_guard.memory import recall, senseless
from kl_guard.outliers import OutlierLedger
from kl_guard.token_keeper import NAME as TOKENS
from kl_guard.versions import versions

MOST_ATTEMPTS = 10  # that are told of; with the default budget there are 2


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
    tokens: Tokens | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)
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
    run: Mapping[str, Any] = next((record for record in reversed(records) if record["type"] == "run"), {})
    config, were = run.get("config"), run.get("versions")
    return Story(
        title=str(folder.parent),
        history=memory.history,
        findings=list(_findings(records)),
        reason=reason,
        action=str(last.get("action", "continue")),
        note=str(last.get("note") or ""),
        target=last.get("to_step"),
        attempts=_attempts(records),
        checkpoints=sorted(memory.checkpoints.values(), key=lambda checkpoint: checkpoint.step),
        pinned=frozenset(_pins(folder / "pins")),
        tokens=_tokens(folder, ledger, reason),
        config=config if isinstance(config, Mapping) else {},
        versions=were if isinstance(were, Mapping) else versions(),
        notes=[*notes, *([senseless(memory.unreadable)] if memory.unreadable else [])],
    )


def _reason(records: Iterable[Mapping[str, Any]], decision: Mapping[str, Any]) -> Finding | None:
    """Return the finding that a decision rests on."""
    reason = None
    for finding in _findings(records):
        if (finding.signature, finding.step) == (decision.get("signature"), decision.get("step")):
            reason = finding
    return reason


def _findings(records: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield the findings in a journal; those that make no sense are left out, as in `recall`."""
    for record in records:
        if record["type"] == "finding":
            try:
                finding = Finding.from_dict(record["finding"])
                int(finding.step), int(finding.attempt)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                continue
            yield finding


def _attempts(records: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Return the last attempts before the present one, each with all that it had observed."""
    ends: list[tuple[int, int]] = []
    for index, record in enumerate(records):
        if record["type"] == "rollback":
            try:
                ends.append((index, int(record["to_step"])))
            except (KeyError, OverflowError, TypeError, ValueError):
                continue
    attempts = []
    for index, to_step in ends[-MOST_ATTEMPTS:]:
        before = recall(records[:index])
        attempts.append(Attempt(before.attempt, before.history, to_step))
    return attempts


def _pins(folder: Path) -> Iterable[int]:
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*")) if folder.is_dir() else ()
    return [int(name) for name in names if name.isdecimal()]


def _tokens(folder: Path, ledger: OutlierLedger, reason: Finding | None) -> Tokens | None:
    """Return the outlier tokens of the step of the alarm, with what stood around them, or of the last that has any."""
    if reason is not None:
        found = tokens_in(folder_of(folder, reason))
        if found is not None or ledger.at(reason.step):
            return found or Tokens(reason.step, ledger.at(reason.step))
    step = ledger.last_step
    return Tokens(step, ledger.at(step)) if step is not None and ledger.at(step) else None
