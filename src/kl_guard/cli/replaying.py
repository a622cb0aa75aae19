"""`kl-guard replay` says when a run should have been stopped, and where it could have gone back to."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_guard.cli import knobs, terminal

if TYPE_CHECKING:
    from kl_guard.cli.answer import Answer


LARGEST = 1e9  # hours, or money an hour


def add_to(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="when should a finished run have been stopped?",
        description="Run the guard over finished logs: trainer_state.json or a folder with checkpoints, console "
        "output, JSON lines, CSV (exports of W&B and MLflow too), TensorBoard folders, the guard's own journal.",
    )
    parser.add_argument(
        "logs",
        nargs="+",
        type=terminal.path,
        metavar="LOG",
        help="a log, or - for standard input; several give a table",
    )
    parser.add_argument("--key", help="name of the KL in the log, where the guard shall not choose")
    parser.add_argument(
        "--report", type=terminal.path, metavar="FILE", help="write the report of one log as an HTML file as well"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object for each log and setting")
    parser.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="KNOB=A,B",
        help="try every combination of these values, as in: --sweep ratio=4,8,16 abs_floor=0.1,0.5",
    )
    parser.add_argument("--hours", type=_positive, help="how long the run took, where its log does not say")
    parser.add_argument("--cost-per-hour", type=_positive, metavar="MONEY", help="say what a halt would have saved")
    knobs.add_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replay each log with each setting and print what comes of it."""
    from kl_guard import GuardConfig
    from kl_guard.cli import piped
    from kl_guard.cli.answer import Question, answers, as_text, table
    from kl_guard.progress import on_terminal

    sweep = [knobs.parse(text) for text in options.sweep]
    names = [name for name, _ in sweep]
    if len(set(names)) < len(names):
        raise ValueError("--sweep takes each knob once")
    settings = [dict(zip(names, values, strict=True)) for values in itertools.product(*(v for _, v in sweep))]
    if options.logs.count(piped.STDIN) > 1:
        raise ValueError(f"{piped.STDIN}, which is {piped.NAME}, can be given once")
    if options.report and len(options.logs) * len(settings) != 1:
        raise ValueError("--report takes one log and no --sweep")
    if options.report:
        from kl_guard.report.writing import refuse_to_overwrite

        log = "/dev/stdin" if options.logs[0] == piped.STDIN else options.logs[0]
        refuse_to_overwrite(Path(options.report), _files(Path(log)))
    asked = [
        Question({**knobs.given(options), **setting}, setting, options.hours, options.cost_per_hour)
        for setting in settings
    ]
    for question in asked:
        GuardConfig.build(**question.knobs)  # what is wrong with a knob is said once, not of each log
    told: list[Answer] = []
    unread = 0
    for log in options.logs:
        try:
            if log == piped.STDIN:
                told += piped.answers(options.key, asked, on_terminal)
            else:
                told += list(answers(log, options.key, asked, on_terminal))
        except (ValueError, OSError) as error:
            if len(options.logs) == 1:
                raise
            terminal.complain(error)
            unread += 1
    if options.report:
        from kl_guard.report import render
        from kl_guard.report.writing import write_page

        write_page(Path(options.report), render(told[0].story()))
    if options.json:
        for one in told:
            json.dump(one.to_dict(), sys.stdout)
            print()
    elif len(options.logs) * len(settings) == 1:
        print(as_text(told[0]))
    elif told:
        print(table(told))
        for note in dict.fromkeys(_of_log(one.log, note) for one in told for note in one.result.notes):
            print(terminal.wrapped(terminal.in_one_line(f"note: {note}")), file=sys.stderr)
    return terminal.USAGE if unread else 0


def _of_log(log: str, note: str) -> str:
    return note if note.startswith(log) else f"{log}: {note}"


def _files(log: Path) -> list[Path]:
    """Return the files that a log is read from: where it is a folder, all that are in it."""
    return [path for path in log.rglob("*") if path.is_file()] if log.is_dir() else [log]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LARGEST:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 1e9, got {text!r}")
    return value
