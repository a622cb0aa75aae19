"""An incident on disk: everything needed to understand a decision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.findings import Decision, Finding
from kl_guard.history import History
from kl_guard.lines import encode
from kl_guard.outliers import outlier_of
from kl_guard.token_stats import Excerpt, Outlier
from kl_guard.versions import versions

RECENT = 200  # observations kept with an incident
MOST = 100  # incidents kept in a folder; of later ones the journal tells


@dataclass(frozen=True)
class Tokens:
    """The outlier tokens of a step, the largest first, and what stands around the first of them."""

    step: int
    outliers: tuple[Outlier, ...]
    excerpts: tuple[Excerpt, ...] = ()


def folder_of(folder: Path, reason: Finding) -> Path:
    """Return where the incident that a finding led to is kept: `<folder>/incidents/<attempt>-<step>-<signature>`."""
    signature = "".join(c for c in reason.signature if c.isalnum() or c in "-_")  # one recalled may say anything
    return folder / "incidents" / f"{int(reason.attempt)}-{int(reason.step)}-{signature}"


def write(
    folder: Path, decision: Decision, config: GuardConfig, run_id: str, history: History, tokens: Tokens | None = None
) -> Path:
    """Write `incident.json` and return its path.

    Raises
    ------
    OSError
        If it cannot be written, or there are 100 already.
    ValueError
        For a decision without a reason.
    """
    reason = decision.reason
    if reason is None:
        raise ValueError("a decision without a reason is no incident")
    target = folder_of(folder, reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() and sum(1 for _ in target.parent.iterdir()) >= MOST:
        raise OSError(f"there are {MOST} in {target.parent} already; the journal tells of this one")
    target.mkdir(exist_ok=True)
    recent = range(max(0, len(history) - RECENT), len(history))
    record = {
        "run_id": run_id,
        "action": decision.action,
        "note": decision.note,
        "finding": reason.to_dict(),
        "checkpoint": asdict(decision.checkpoint) if decision.checkpoint else None,
        "config": asdict(config),
        "versions": versions(),
        "tokens": None if tokens is None else _plain(tokens),
        "observations": [history[i].known() for i in recent],
    }
    path = target / "incident.json"
    draft = target / "incident.json.tmp"
    draft.write_text(encode(record) + "\n")
    return draft.replace(path)


def tokens_in(folder: Path) -> Tokens | None:
    """Return the tokens that an incident's folder keeps; None where there are none, or they make no sense."""
    try:
        record = json.loads((folder / "incident.json").read_text(encoding="utf-8"))["tokens"]
        outliers = tuple(outlier_of(one) for one in record["outliers"])
        excerpts = tuple(_excerpt(one) for one in record["excerpts"])
        return Tokens(int(record["step"]), outliers, tuple(e for e in excerpts if 0 <= e.outlier < len(outliers)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _plain(tokens: Tokens) -> dict[str, Any]:
    outliers = [outlier.to_dict() for outlier in tokens.outliers]
    return {"step": tokens.step, "outliers": outliers, "excerpts": [asdict(excerpt) for excerpt in tokens.excerpts]}


def _excerpt(record: Mapping[str, Any]) -> Excerpt:
    ids = tuple(int(token_id) for token_id in record["token_ids"])
    kl = tuple(None if value is None else float(value) for value in record["kl"])
    texts = tuple(None if text is None else str(text) for text in record["texts"])
    if not len(ids) == len(kl) == len(texts):
        raise ValueError("an excerpt whose tokens, KL and texts are not equally many")
    return Excerpt(int(record["outlier"]), int(record["start"]), ids, kl, texts)


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
    from kl_guard.report.writing import write_page

    return write_page(target / "report.html", render(story_of(folder)))
