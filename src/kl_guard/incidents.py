"""An incident on disk: everything needed to understand a decision."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path

from kl_guard._version import __version__
from kl_guard.config import GuardConfig
from kl_guard.findings import Decision
from kl_guard.history import History
from kl_guard.lines import encode

RECENT = 200  # observations kept with an incident


def folder_of(folder: Path, decision: Decision) -> Path:
    """Return where a decision's incident is kept: `<folder>/incidents/<attempt>-<step>-<signature>`."""
    reason = decision.reason
    if reason is None:
        raise ValueError("a decision without a reason is no incident")
    return folder / "incidents" / f"{reason.attempt}-{reason.step}-{reason.signature}"


def write(folder: Path, decision: Decision, config: GuardConfig, run_id: str, history: History) -> Path:
    """Write `incident.json` and return its path.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    reason = decision.reason
    target = folder_of(folder, decision)
    target.mkdir(parents=True, exist_ok=True)
    recent = range(max(0, len(history) - RECENT), len(history))
    record = {
        "run_id": run_id,
        "action": decision.action,
        "note": decision.note,
        "finding": reason.to_dict() if reason else None,
        "checkpoint": asdict(decision.checkpoint) if decision.checkpoint else None,
        "config": asdict(config),
        "versions": {"kl_guard": __version__, "python": platform.python_version()},
        "observations": [history[i].known() for i in recent],
    }
    path = target / "incident.json"
    draft = target / "incident.json.tmp"
    draft.write_text(encode(record) + "\n")
    return draft.replace(path)


def write_report(folder: Path, target: Path) -> Path:
    """Write `report.html` of the run as its files in `folder` tell it, into `target`; return its path.

    Raises
    ------
    OSError
        If it cannot be written.
    ImportError
        Without jinja2.
    """
    from kl_guard.report import render, story_of  # what it needs is loaded only when something has happened

    path = target / "report.html"
    draft = target / "report.html.tmp"
    draft.write_text(render(story_of(folder)), encoding="utf-8")
    return draft.replace(path)
