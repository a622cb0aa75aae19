"""What trainers print: Python dictionaries and the lines of verl, amid whatever else goes to a console."""

from __future__ import annotations

import re
from typing import Any

from kl_guard.logs.base import LineFormat, Row, without_kl
from kl_guard.names import STEPS, is_known

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DICT = re.compile(r"\{[^{}]*\}")
_WRAPPED = r"(?:(?:np\.|numpy\.)?(?:float|int)\d*\(|tensor\()?"  # as numpy 2 and torch show a number
_PAIR = re.compile(r"""['"]([^'"]{1,200})['"]\s*:\s*['"]?""" + _WRAPPED + r"([-+.\w/]{1,60})")
_VERL = re.compile(r"\bstep:(\d{1,15}) - (.*)")
_NUMBER = re.compile(_WRAPPED + r"([-+.\w]{1,60})\)?$")
_STEP_BEFORE = re.compile(r"(?:step|iteration)\W{1,3}(\d{1,15})\b", re.IGNORECASE)
_NEAR = 120  # characters before a dictionary in which its step may stand


class ConsoleFormat(LineFormat):
    """A line is text that may hold dictionaries of metrics, such as `{'loss': 0.1, 'kl': '0.02'}`, or verl's pairs.

    Rows are only what has a metric that is known; no other line is wrong.
    """

    none_is_nan = True
    may_round = True

    def without_kl(self, names: list[str]) -> str:  # noqa: D102
        if names:
            return without_kl(names)
        return "neither JSON nor a CSV file with a known column, and no metrics in it as trainers print them"

    def parse(self, line: str) -> list[Row]:  # noqa: D102
        if "{" not in line and "step:" not in line:
            return []
        rows = []
        for part in _ANSI.sub("", line).split("\r"):  # a progress bar returns to the start of its line
            verl = _VERL.search(part)
            found = [_verl_row(verl)] if verl else list(_dict_rows(part))
            rows += [row for row in found if any(is_known(key) for key in row)]
        return rows


def _dict_rows(text: str) -> list[Row]:
    rows = []
    for match in _DICT.finditer(text):
        row: Row = {}
        for name, shown in _PAIR.findall(match.group()):
            value = _value(shown)
            if value is not None or shown == "None":
                row[name] = value
        if not row:
            continue
        before = text[max(0, match.start() - _NEAR) : match.start()]
        step = _STEP_BEFORE.findall(before)
        if step and not row.keys() & set(STEPS):
            row["step"] = int(step[-1])
        rows.append(row)
    return rows


def _verl_row(match: re.Match[str]) -> Row:
    row: Row = {"step": int(match.group(1))}
    for pair in match.group(2).split(" - "):
        name, _, shown = pair.strip().rpartition(":")
        number = _NUMBER.match(shown)
        value = _value(number.group(1)) if number else None
        if name and value is not None:
            row[name] = value
    return row


def _value(shown: str) -> Any:
    """Return the number that is shown, None where it is none; a "5/100" stays text."""
    try:
        return float(shown)
    except ValueError:
        return shown if re.fullmatch(r"\d+/\d+", shown) else None
