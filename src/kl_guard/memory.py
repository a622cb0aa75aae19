"""What a journal says about a run, put together again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kl_guard.findings import Checkpoint, Finding
from kl_guard.history import History
from kl_guard.observation import Observation

BLOCK = 1000  # observations in a line
NEAR = 5  # observations around a checkpoint whose median is its recorded KL


@dataclass(frozen=True)
class Changes:
    """What an attempt does otherwise: factors on the learning rate and on beta, relative to the run as started."""

    learning_rate: float = 1.0
    beta: float = 1.0


@dataclass(frozen=True)
class Failure:
    """What ended an attempt: the finding's signature, its step, and the departure where it has one."""

    signature: str
    step: int
    departure: int | None


@dataclass(frozen=True)
class Return:
    """A rollback that was made: to which step, and the KL that was recorded there (None where none was)."""

    step: int
    recorded_kl: float | None


@dataclass
class Memory:
    """The state of a run that its journal's records add up to; going back takes later steps away.

    `mid_run` says that the history does not reach back to the beginning of the run, `since_rollback` how many
    observations there were since the last rollback, `pending` to which step a rollback was decided and not made yet,
    `told_at` at which steps there were findings, in any attempt, `alerted` the keys of incidents that were sent
    (`Incident.key`): they stay, wherever the run goes back to, but for halts. Who resumes a run behind a halt wants to
    hear of the next one, also where it is at the same step.
    """

    run_id: str | None = None
    attempt: int = 0
    rollbacks: int = 0
    history: History = field(default_factory=History)
    findings: list[Finding] = field(default_factory=list)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    changes: dict[int, Changes] = field(default_factory=lambda: {0: Changes()})
    facts: dict[str, Any] = field(default_factory=dict)
    unreadable: int = 0
    mid_run: bool = False
    since_rollback: int | None = None
    returned: Return | None = None
    pending: int | None = None
    pending_failure: Failure | None = None
    alerted: set[tuple[int, int, str, str]] = field(default_factory=set)
    told_at: set[int] = field(default_factory=set)

    def go_back(self, step: int) -> None:
        """Forget what came after `step`."""
        self.history.truncate(step)
        self.findings = [f for f in self.findings if f.step <= step]
        self.checkpoints = {s: c for s, c in self.checkpoints.items() if s <= step}
        self.alerted = {key for key in self.alerted if key[3] != "halt" or key[1] <= step}
        self.pending = self.pending_failure = None
        if self.returned is not None and step < self.returned.step:
            self.returned = None
        if self.since_rollback is not None and self.returned is not None:
            self.since_rollback = len(self.history) - self.history.index(self.returned.step + 1)

    def roll_back(self, step: int, attempt: int) -> None:
        """Begin a new attempt from `step`: findings are said anew."""
        self.returned = Return(step, self.recorded_kl(step))
        if self.pending_failure is not None:
            self.failures.append(self.pending_failure)
        self.go_back(step)
        self.attempt = attempt
        self.rollbacks += 1
        self.findings = []
        self.since_rollback = 0

    def decide(self, failure: Failure, to_step: int | None) -> None:
        """Note a decision to act; once the rollback `to_step` is made, the failure counts among those of the run."""
        self.pending = to_step
        self.pending_failure = None if to_step is None else failure

    def observe(self, observation: Observation) -> None:
        """Add an observation: equal steps merge, smaller ones do not count."""
        if not len(self.history):
            self.mid_run = self.mid_run and observation.first_step > 1
        if self.history.add(observation) and self.since_rollback is not None:
            self.since_rollback += 1

    def observe_all(self, block: History) -> None:
        """Add observations as `observe` does, at once where they are all of later steps."""
        first = next(iter(block), None)
        if first is not None and len(self.history) and first.step <= self.history.steps[-1]:
            for observation in block:
                self.observe(observation)
        elif first is not None:
            if not len(self.history):
                self.mid_run = self.mid_run and first.first_step > 1
            self.history.extend(block)
            if self.since_rollback is not None:
                self.since_rollback += len(block)

    def recorded_kl(self, step: int) -> float | None:
        """Return the KL of the weights at `step`: those that the next observation shows, and the ones before it."""
        until = self.history.index(step + 1) + 1
        kl = [value for value in self.history.column("kl_mean")[max(0, until - NEAR) : until] if math.isfinite(value)]
        return statistics.median(kl) if kl else None


def retell(memory: Memory) -> Iterator[dict[str, Any]]:
    """Yield records that add up to a memory, but for its run."""
    history, returned = memory.history, memory.returned
    if memory.facts:
        yield {"type": "facts", "facts": memory.facts}
    if memory.mid_run:
        yield {"type": "resume", "step": 1}
    split = 0 if returned is None else history.index(returned.step + 1)
    yield from _blocks(history, 0, split)
    first = memory.attempt - memory.rollbacks + 1
    for number in range(memory.rollbacks):
        to_step = 0 if returned is None else returned.step
        if number < len(memory.failures):
            yield {"type": "decision", "to_step": to_step, **asdict(memory.failures[number])}
        yield {"type": "rollback", "to_step": to_step, "attempt": first + number}
    yield from _blocks(history, split, len(history))
    for finding in memory.findings:
        yield {"type": "finding", "finding": finding.to_dict()}
    for checkpoint in memory.checkpoints.values():
        yield {"type": "checkpoint", **asdict(checkpoint)}
    for attempt, changes in memory.changes.items():
        yield {"type": "change", "attempt": attempt, **asdict(changes)}
    for attempt, step, signature, action in sorted(memory.alerted):
        yield {"type": "alert", "attempt": attempt, "step": step, "signature": signature, "action": action}
    if memory.pending is not None and memory.pending_failure is not None:
        yield {"type": "decision", "to_step": memory.pending, **asdict(memory.pending_failure)}


def _blocks(history: History, start: int, stop: int) -> Iterator[dict[str, Any]]:
    for at in range(start, stop, BLOCK):
        yield {"type": "block", **history.packed(at, min(at + BLOCK, stop))}


def recall(records: Iterable[Mapping[str, Any]]) -> Memory:
    """Fold the records of a journal into what they add up to; records that make no sense are counted, not used."""
    memory = Memory()
    for record in records:
        try:
            _apply(memory, record)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            memory.unreadable += 1
    return memory


def senseless(count: int) -> str:
    """Say that records made no sense, as `recall` has counted them."""
    return f"{count} records make no sense and are left out" if count > 1 else "a record makes no sense and is left out"


def _apply(memory: Memory, record: Mapping[str, Any]) -> None:
    kind = record["type"]
    if kind == "observation":
        memory.observe(Observation.from_mapping(record, record["step"], record.get("window", 1)))
    elif kind == "block":
        memory.observe_all(History.unpacked(record))
    elif kind == "run":
        memory.run_id = str(record["run_id"])
    elif kind == "finding":
        finding = Finding.from_dict(record["finding"])
        memory.findings.append(finding)
        memory.told_at.add(finding.step)
    elif kind == "checkpoint":
        checkpoint = Checkpoint.from_dict(record)
        memory.checkpoints[checkpoint.step] = checkpoint
    elif kind == "resume":
        memory.go_back(int(record["step"]))
        memory.mid_run = memory.mid_run or (not len(memory.history) and int(record["step"]) > 0)
    elif kind == "rollback":
        memory.roll_back(int(record["to_step"]), int(record["attempt"]))
    elif kind == "change":
        changes = Changes(float(record["learning_rate"]), float(record["beta"]))
        memory.changes[int(record["attempt"])] = changes
    elif kind == "facts":
        memory.facts.update(record["facts"])
    elif kind == "alert":
        key = int(record["attempt"]), int(record["step"]), str(record["signature"]), str(record["action"])
        memory.alerted.add(key)
    elif kind == "decision":
        departure, to_step = record.get("departure"), record.get("to_step")
        failure = Failure(
            str(record.get("signature")), int(record["step"]), None if departure is None else int(departure)
        )
        memory.decide(failure, None if to_step is None else int(to_step))
