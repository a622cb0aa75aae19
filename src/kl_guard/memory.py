"""What a journal says about a run, put together again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kl_guard.findings import Checkpoint, Finding
from kl_guard.history import History
from kl_guard.observation import Observation

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
    observations there were since the last rollback, `pending` to which step a rollback was decided and not made yet.
    `alerted` are the keys of incidents that were sent (`Incident.key`): they stay, wherever the run goes back to.
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

    def go_back(self, step: int) -> None:
        """Forget what came after `step`."""
        self.history.truncate(step)
        self.findings = [f for f in self.findings if f.step <= step]
        self.checkpoints = {s: c for s, c in self.checkpoints.items() if s <= step}
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
        if not len(self.history) or observation.step > self.history.steps[-1]:
            self.history.append(observation)
            if self.since_rollback is not None:
                self.since_rollback += 1
        elif observation.step == self.history.steps[-1]:
            self.history.replace_last(self.history[-1].merged(observation))

    def recorded_kl(self, step: int) -> float | None:
        """Return the KL of the weights at `step`: those that the next observation shows, and the ones before it."""
        until = self.history.index(step + 1) + 1
        kl = [value for value in self.history.column("kl_mean")[max(0, until - NEAR) : until] if math.isfinite(value)]
        return statistics.median(kl) if kl else None


def recall(records: Iterable[Mapping[str, Any]]) -> Memory:
    """Fold the records of a journal into what they add up to; records that make no sense are counted, not used."""
    memory = Memory()
    for record in records:
        try:
            _apply(memory, record)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            memory.unreadable += 1
    return memory


def _apply(memory: Memory, record: Mapping[str, Any]) -> None:
    kind = record["type"]
    if kind == "observation":
        memory.observe(Observation.from_mapping(record, record["step"], record.get("window", 1)))
    elif kind == "run":
        memory.run_id = str(record["run_id"])
    elif kind == "finding":
        memory.findings.append(Finding.from_dict(record["finding"]))
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
