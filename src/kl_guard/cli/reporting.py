"""`kl-guard report` and `kl-guard tokens`: what a run's own files say."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kl_guard.cli import tables, terminal

FOLDER = "kl_guard"


def add_to(commands: Any) -> None:
    """Add the commands."""
    report: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write the report of a run as one HTML file",
        description="Write one HTML file, opened from disk, that says what the guard saw in a run.",
    )
    report.add_argument(
        "run_dir", type=terminal.path, metavar="RUN_DIR", help="the run's output folder, or kl_guard/ in it"
    )
    report.add_argument(
        "--output", "-o", type=terminal.path, metavar="FILE", help="where to; RUN_DIR/kl_guard/report.html otherwise"
    )
    report.set_defaults(run=run_report)
    tokens: argparse.ArgumentParser = commands.add_parser(
        "tokens",
        help="which tokens carried the KL",
        description="Print the tokens that kept coming back among those with the largest KL, the last 64 steps.",
    )
    tokens.add_argument(
        "run_dir", type=terminal.path, metavar="RUN_DIR", help="the run's output folder, or kl_guard/ in it"
    )
    tokens.add_argument("--step", type=int, help="those of one step")
    tokens.add_argument("--json", action="store_true", help="print JSON, one object a line")
    tokens.set_defaults(run=run_tokens)


def run_report(options: argparse.Namespace) -> int:
    """Write the report and print where."""
    from kl_guard.report import render, story_of
    from kl_guard.report.writing import refuse_to_overwrite, write_page

    folder = _folder(options.run_dir)
    target = Path(options.output) if options.output else folder / "report.html"
    own = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    refuse_to_overwrite(target, own)
    story = story_of(folder)
    if not len(story.history):
        raise ValueError(f"{folder / 'journal.jsonl'}: no observation in it")
    write_page(target, render(story))
    print(terminal.in_one_line(str(target)) if sys.stdout.isatty() else target)
    return 0


def run_tokens(options: argparse.Namespace) -> int:
    """Print outlier tokens."""
    from kl_guard.lines import JsonLines
    from kl_guard.outliers import OutlierLedger
    from kl_guard.token_keeper import NAME

    folder = _folder(options.run_dir)
    if not (folder / NAME).is_file():
        raise ValueError(f"{folder / NAME} is not there: no tokens were observed in this run")
    ledger = OutlierLedger()
    ledger.recall(JsonLines(folder / NAME).tail())
    if ledger.last_step is None:
        raise ValueError(f"{folder / NAME}: no tokens in it")
    if options.step is not None:
        rows = [{"kl": o.kl, **o.to_dict()} for o in ledger.at(options.step)]
        if not rows:
            raise ValueError(f"there are no tokens of step {options.step}; the last is {ledger.last_step}")
    else:
        rows = [{"steps": r.steps, "kl_sum": r.kl, **r.worst.to_dict()} for r in ledger.ids()]
    if options.json:
        for row in rows:
            json.dump(row, sys.stdout)
            print()
    else:
        print(_table(rows))
    return 0


def _table(rows: list[dict[str, Any]]) -> str:
    names = ["steps", "kl", "policy_logprob", "ref_logprob", "position", "token_id", "text", "prompt"]
    names = [name for name in names if any(name in row for row in rows)]
    cells = [[row.get(name) for name in names] for row in rows]
    return tables.table(
        {name.replace("_", " "): name in {"text", "prompt"} for name in names},
        [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in cells],
    )


def _folder(run_dir: str) -> Path:
    """Return the guard's folder of a run.

    Raises
    ------
    ValueError
        If there is none.
    """
    given = Path(run_dir)
    for folder in (given / FOLDER, given):
        if (folder / "journal.jsonl").is_file():
            return folder
    raise ValueError(f"{given} has no {FOLDER}/journal.jsonl: no guard has watched a run there")
