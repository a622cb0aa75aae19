"""What a journal says about a run, put together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kl_guard.findings import Checkpoint, Finding
from kl_guard.history import History
from kl_guard.observation import Observation


@dataclass
class Memory:
    """The state of a run that its journal's records add up to; going back takes later steps away.

    `mid_run` says that the history does not reach back to the beginning of the run, `since_rollback` how many
    observations there were since the last rollback.
    """

    run_id: str | None = None
    attempt: int = 0
    rollbacks: int = 0
    history: History = field(default_factory=History)
    findings: list[Finding] = field(default_factory=list)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    unreadable: int = 0
    mid_run: bool = False
    since_rollback: int | None = None

    def go_back(self, step: int) -> None:
        """Forget what came after `step`."""
        self.history.truncate(step)
        self.findings = [f for f in self.findings if f.step <= step]
        self.checkpoints = {s: c for s, c in self.checkpoints.items() if s <= step}

    def roll_back(self, step: int, attempt: int) -> None:
        """Begin a new attempt from `step`: findings are said anew."""
        self.go_back(step)
        self.attempt = attempt
        self.rollbacks += 1
        self.findings = []
        self.since_rollback = 0

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
        step = int(record["step"])
        memory.checkpoints[step] = Checkpoint(step, str(record["path"]), bool(record["calm"]))
    elif kind == "resume":
        memory.go_back(int(record["step"]))
        memory.mid_run = memory.mid_run or (not len(memory.history) and int(record["step"]) > 0)
    elif kind == "rollback":
        memory.roll_back(int(record["to_step"]), int(record["attempt"]))
