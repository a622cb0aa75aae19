"""What the guard says: severities, findings, decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal

Step = Literal["continue", "halt", "rollback"]


class Severity(str, Enum):
    """How bad a finding is: `info` < `warn` < `critical`. Equal to its own name as a string.

    Examples
    --------
    >>> Severity.WARN == "warn", Severity.INFO < Severity.CRITICAL
    (True, True)
    """

    INFO = "info"
    WARN = "warn"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for info, 1 for warn, 2 for critical."""
        return list(Severity).index(self)

    def __lt__(self, other: object) -> bool:
        return self.rank < Severity(other).rank

    def __le__(self, other: object) -> bool:
        return self.rank <= Severity(other).rank

    def __gt__(self, other: object) -> bool:
        return self.rank > Severity(other).rank

    def __ge__(self, other: object) -> bool:
        return self.rank >= Severity(other).rank

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Cause:
    """One possible cause: its name, what speaks for it in this run, and what to try.

    `settings` are values to try, by the trainer's own names, where the remedy comes down to some.
    """

    name: str
    evidence: str
    remedy: str
    settings: Mapping[str, float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A detector's statement about the run.

    `step` is where it was said, `onset_step` the first sustained crossing of the threshold, `departure_step` where the
    curve left its own regime (at or before the onset; a rollback must go behind it). `evidence` holds the numbers it
    rests on, `causes` are in order of likelihood, `remedies` are what to try, in the same order.
    """

    signature: str
    severity: Severity
    step: int
    message: str
    onset_step: int | None = None
    departure_step: int | None = None
    attempt: int = 0
    evidence: Mapping[str, float | int | str | None] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to try, in order of likelihood."""
        return tuple(cause.remedy for cause in self.causes)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain values, ready for JSON."""
        return asdict(self) | {"severity": self.severity.value, "evidence": dict(self.evidence)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Rebuild a finding that `to_dict` returned."""
        return cls(
            signature=data["signature"],
            severity=Severity(data["severity"]),
            step=data["step"],
            message=data["message"],
            onset_step=data.get("onset_step"),
            departure_step=data.get("departure_step"),
            attempt=data.get("attempt", 0),
            evidence=data.get("evidence") or {},
            causes=tuple(Cause(**cause) for cause in data.get("causes", ())),
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of the run.

    `step` is where it was saved, `path` its folder or its one file, `calm` whether no suspicion stood then, `aligned`
    whether the framework resumes from it exactly, `attempt` the attempt it belongs to. `files` are the sizes of its
    files by name, `facts` is what an adapter noted of the state that was saved, to compare a restored one with.
    """

    step: int
    path: str
    calm: bool = True
    aligned: bool = True
    attempt: int = 0
    files: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Rebuild a checkpoint from plain values, as `asdict` gives them; those of older journals have fewer."""
        return cls(
            step=int(data["step"]),
            path=str(data["path"]),
            calm=bool(data["calm"]),
            aligned=bool(data.get("aligned", True)),
            attempt=int(data.get("attempt", 0)),
            files={str(name): int(size) for name, size in (data.get("files") or {}).items()},
            facts=dict(data.get("facts") or {}),
        )


@dataclass(frozen=True)
class Decision:
    """What the guard tells the loop to do, with the findings that are new at this step.

    `action` is "continue", "halt" or "rollback"; `checkpoint` is where to go back to (for a rollback always there,
    for a halt if there is one); `reason` is the finding that decided, `note` why it is not what was configured.
    """

    action: Step = "continue"
    findings: tuple[Finding, ...] = ()
    checkpoint: Checkpoint | None = None
    reason: Finding | None = None
    note: str = ""

    def __bool__(self) -> bool:
        """Whether the loop has to do anything but continue."""
        return self.action != "continue"


class KLGuardHalted(RuntimeError):  # noqa: N818 - the public name is fixed
    """The guard halted the run, and the user asked for an exception (`on_halt="raise"`).

    `decision` is the guard's decision.
    """

    def __init__(self, message: str, decision: Decision | None = None) -> None:
        super().__init__(message)
        self.decision = decision
