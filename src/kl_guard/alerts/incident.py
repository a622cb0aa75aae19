"""What an alert is about, and its words."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from kl_guard.findings import Decision, Finding
from kl_guard.messages import what_happened, what_was_done

LONGEST_TITLE = 63  # W&B takes no longer one
LONGEST_TEXT = 1500  # Discord takes 2000


@dataclass(frozen=True)
class Incident:
    """What an alert is about; `on_incident` is called with one.

    That is each decision to halt or to go back, each critical finding under `action="warn"`, and, once in a run, a
    fault of the guard itself, which then does not watch any more.

    Attributes
    ----------
    title, text:
        The alert in words: one line, and what happened, what was done about it, the likeliest cause, where to look.
    decision:
        What the guard decided: `.action` is "halt" or "rollback"; "continue" where nothing was done.
    finding:
        The finding that it rests on; None where a rollback failed its checks and the run was halted for that, and for
        a fault of the guard: `decision.note` says which.
    step, attempt:
        Where the run was.
    run_id:
        Which run: the name that its journal has.
    folder:
        Where the incident is kept (`incident.json` is in it); None where nothing was written.
    report:
        The report, an HTML file; None where there is none.
    """

    title: str
    text: str
    decision: Decision
    finding: Finding | None
    step: int
    attempt: int
    run_id: str
    folder: Path | None = None
    report: Path | None = None

    @property
    def key(self) -> tuple[int, int, str, str]:
        """What makes it the same as another one of its run: attempt, step, signature and what was done."""
        return self.attempt, self.step, self.finding.signature if self.finding else "", self.decision.action


def incident_of(
    decision: Decision,
    finding: Finding | None,
    *,
    step: int,
    attempt: int,
    run_id: str,
    output_dir: Path | None,
    written: Path | None = None,
    done: str = "",
) -> Incident:
    """Return the incident of a decision.

    `written` is its report, or its `incident.json` where there is no report; `done` says what was done about it, where
    that is not what the decision says.
    """
    report = written if written is not None and written.suffix == ".html" else None
    seen = "critical" if finding is None else str(finding.severity)  # a warning, where halt_on="warn" would act on it
    word = {"halt": "halted", "rollback": "going back", "continue": seen}[decision.action]
    what = finding.signature if finding else "rollback failed" if decision.action == "halt" else "the guard is blind"
    title = f"{what}: {word} at step {step}" if finding or decision else f"{what} from step {step} on"
    return Incident(
        title=_plain(title, LONGEST_TITLE),
        text=_plain(_text(decision, finding, run_id, output_dir, report, done), LONGEST_TEXT),
        decision=decision,
        finding=finding,
        step=step,
        attempt=attempt,
        run_id=run_id,
        folder=None if written is None else written.parent,
        report=report,
    )


def _text(
    decision: Decision, finding: Finding | None, run_id: str, output_dir: Path | None, report: Path | None, done: str
) -> str:
    back = decision.checkpoint
    said = [] if finding is None else [f"{what_happened(finding)}."]
    if done:
        said.append(f"{done}.")
    elif decision.action == "rollback" and back is not None:
        said.append(f"The run is going back to the checkpoint of step {back.step}.")
    elif finding is None and not decision:
        said.append(f"{decision.note}.")
    else:
        said.append(f"{what_was_done(decision.action, None, decision.note)}.")
    lines = [" ".join(said)]
    if finding is not None and finding.causes:
        lines.append(f"Likeliest cause: {finding.causes[0].name}. Try: {finding.causes[0].remedy}.")
    if decision.action == "halt" and back is not None:
        lines.append(f"Last checkpoint from before it: {back.path} (step {back.step}).")
    if report is not None:
        lines.append(f"Report: {report.absolute()}")
    where = "" if output_dir is None else f" in {output_dir.absolute()}"
    lines.append(f"Run {run_id}{where} on {socket.gethostname()}.")
    return "\n".join(line if len(line) <= LONGEST_TEXT // 2 else f"{line[: LONGEST_TEXT // 2]}…" for line in lines)


def _plain(text: str, longest: int) -> str:
    """Return text without control characters, cut to a length: part of it may come from a model or a log."""
    kept = "".join(c for c in text if c.isprintable() or c == "\n")
    return kept if len(kept) <= longest else f"{kept[: longest - 1]}…"
