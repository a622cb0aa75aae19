"""JSON lines: one object a line."""

from __future__ import annotations

import json

from kl_guard.history import History
from kl_guard.logs.base import LineFormat, Row


class JsonLinesFormat(LineFormat):
    """A line is one JSON object; empty lines count for nothing."""

    def parse(self, line: str) -> list[Row]:  # noqa: D102
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line or line.isspace():
                return []
            raise ValueError(f"is not JSON ({_shortened(error)})") from error
        if not isinstance(row, dict):
            raise ValueError("is not a row of names and values")
        if row.get("type") == "block":  # a journal that is followed as it grows
            try:
                return [observation.known() for observation in History.unpacked(row)]
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                raise ValueError(f"is no block of observations ({_shortened(error)})") from error
        return [row]


def _shortened(error: Exception) -> str:
    return str(error)[:200]
