"""Which kind of log a path is: told by content, never by name."""

from __future__ import annotations

import codecs
import json
import os
import re
from pathlib import Path

from kl_guard.logs import trainer_state
from kl_guard.logs.base import LineFormat, LineLog, Log
from kl_guard.logs.console import ConsoleFormat
from kl_guard.logs.jsonl import JsonLinesFormat
from kl_guard.logs.own import JournalLog, is_record
from kl_guard.logs.tables import CsvFormat, LongTable, is_long, names_of
from kl_guard.logs.tensorboard import EVENTS, EventLog, is_events
from kl_guard.logs.text import head_of
from kl_guard.names import STEPS, is_known

JOURNAL = "journal.jsonl"


def open_log(path: str | os.PathLike[str]) -> Log:
    """Return the reader of a log.

    Raises
    ------
    ValueError
        When the path is none of the kinds known.
    OSError
        If it cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_fifo():
        raise ValueError(
            f"{path}: a pipe, of which the beginning cannot be read twice; write it to a file first, "
            "or give it to `kl-guard replay -` on standard input"
        )
    head = head_of(path)
    if is_events(head):
        return EventLog(path)
    if not head:
        raise ValueError(f"{path}: empty, so neither JSON nor a CSV file")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path}: UTF-16, which is not read; save it as UTF-8")
    if b"\0" in head.lstrip().partition(b"\n")[0]:  # further on a crash may have left some
        raise ValueError(f"{path}: binary, neither JSON nor a CSV file nor text that a trainer prints")
    text = head.decode("utf-8-sig", "replace")
    if re.match(r"\s*(\{|\[\s*(\{|\]|$))", text):
        return _open_json(path, text)
    names = names_of(first_line(text))
    if is_long(names):
        return LongTable(path)
    return LineLog(path, line_format(text))


def line_format(text: str) -> type[LineFormat]:
    """Return the format of a file that is read line by line, by how it begins."""
    line = first_line(text)
    if line.startswith("{"):
        return ConsoleFormat if _is_python(line) else JsonLinesFormat
    names = names_of(line)
    known = [name for name in names if is_known(name) or name.rpartition(" - ")[2] in STEPS]
    return CsvFormat if known and len(line) < 2**16 and "{" not in line else ConsoleFormat


def first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return text.lstrip().partition("\n")[0].rstrip("\r")


def _is_python(line: str) -> bool:
    """Whether a line that begins with a brace is a dictionary as Python prints it."""
    return line[1:].lstrip().startswith("'")


def _open_json(path: Path, text: str) -> Log:
    line = first_line(text)
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        if _is_python(line):
            return LineLog(path, ConsoleFormat)
        if '"log_history"' in line or line.strip() == "{" or line.startswith("["):
            return trainer_state.TrainerState(path)
        return LineLog(path, JsonLinesFormat)  # torn, or longer than what was looked at
    if is_record(first):
        return JournalLog(path)
    if isinstance(first, list) or (isinstance(first, dict) and isinstance(first.get("log_history"), list)):
        return trainer_state.TrainerState(path)
    return LineLog(path, JsonLinesFormat)


def _open_folder(folder: Path) -> Log:
    states = list(trainer_state.in_folder(folder))
    unreadable = ""
    for state in states:
        try:
            history = trainer_state.read_history(state)
        except ValueError as error:
            unreadable = unreadable or str(error)
            continue
        log: Log = trainer_state.TrainerState(state, history)
        if unreadable:
            log.notes.add("state", f"{unreadable}; {state} is read instead")
        return log
    if unreadable:
        raise ValueError(unreadable)
    for journal in (folder / JOURNAL, folder / "kl_guard" / JOURNAL):
        if journal.is_file():
            return JournalLog(journal)
    if next(folder.rglob(EVENTS), None) is not None:
        return EventLog(folder)
    raise ValueError(f"{folder}: a folder without {trainer_state.STATE}, checkpoints, TensorBoard events or a journal")
