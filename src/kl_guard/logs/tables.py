"""Logs that are tables: `trainer_state.json`, JSON lines, CSV, and the guard's own journal."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard.observation import ALIASES, METRICS

logger = logging.getLogger("kl_guard")

Row = dict[str, Any]


def read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Yield the rows of a log, told by its content and not by its name.

    Raises
    ------
    ValueError
        When the file is none of the kinds known, or has no column of KL; the message has the path.
    OSError
        If it cannot be opened.
    """
    text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    try:
        rows = list(_parse(path, text))
    except (csv.Error, RecursionError) as error:
        raise ValueError(f"{path}: neither JSON nor a CSV file that can be read ({error})") from error
    if not any(_has_kl(row) for row in rows):
        keys = sorted({key for row in rows for key in row})
        raise ValueError(f"{path}: no KL in this log; it has: {', '.join(keys[:40]) or 'nothing'}")
    yield from rows


def _parse(path: str | os.PathLike[str], text: str) -> Iterator[Row]:
    start = text.lstrip()[:1]
    if start != "{":
        return _csv_rows(path, text)
    try:
        whole = json.loads(text)
    except ValueError:
        return _json_lines(path, text)
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return (dict(row) for row in whole["log_history"] if isinstance(row, dict) and "loss" in row)
    return _json_lines(path, text)


def _json_lines(path: str | os.PathLike[str], text: str) -> Iterator[Row]:
    rows: list[Row] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if rows and number == len(lines) and not text.endswith("\n"):
                logger.warning("kl-guard: %s: line %d is torn; it is left out", path, number)
                break
            raise ValueError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is not a row of names and values")
        if row.get("type") == "run":
            return iter([observation.known() for observation in recall(read_journal(path)[0]).history])
        rows.append(row)
    return iter(rows)


def _csv_rows(path: str | os.PathLike[str], text: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    names = set(reader.fieldnames or ())
    if not names & _KL_NAMES:
        raise ValueError(
            f"{path}: neither JSON nor a CSV file with a column kl or kl_mean; columns: {sorted(names)[:40]}"
        )
    for row in reader:
        yield {key: value if value != "" else None for key, value in row.items() if key is not None}


_KL_NAMES = frozenset({"kl_mean", *(alias for alias, name in ALIASES.items() if name == "kl_mean")})


def _has_kl(row: Mapping[str, Any]) -> bool:
    return bool(_KL_NAMES & row.keys()) and bool(row.keys() & {*METRICS, *ALIASES})
