"""CSV with one column per metric, W&B exports included, and the long form that MLflow writes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from kl_guard.logs.base import LineFormat, LineLog, Log, Row
from kl_guard.logs.tally import Tally
from kl_guard.names import STEPS, is_known

DELIMITERS = ",;\t"
LONGEST_CELL = 2**20  # characters
_LONG = frozenset({"key", "value", "step"})
_NOTHING = frozenset({"None", "null", "N/A", "NA"})


class CsvFormat(LineFormat):
    """The first line is the header; an empty cell says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._header: list[str] | None = None
        self._delimiter = ","
        self._open: list[str] = []  # lines of a row whose quoted cell goes on in the next one
        self._length = 0

    def without_kl(self, names: list[str]) -> str:  # noqa: D102
        return (
            f"neither JSON nor a CSV file with a column kl or kl_mean; columns: {names} (names known: kl_guard.names)"
        )

    def parse(self, line: str) -> list[Row]:  # noqa: D102
        closes = line.count('"') % 2 == 1
        if not self._open and not closes:
            return self._rows(line)
        if self._open and not closes and self._is_row(line):
            return [*self._reread(after=1), *self.read(line)]
        self._open.append(line)
        self._length += len(line) + 1
        if closes == (len(self._open) == 1):  # it opens a cell, or leaves it open
            return self._reread() if self._length > LONGEST_CELL else []
        whole, self._open, self._length = self._open, [], 0
        try:
            return self._rows("\n".join(whole))
        except ValueError:
            self._open = whole
            return self._reread()

    def finish(self) -> list[Row]:  # noqa: D102
        return self._reread() if self._open else []

    def _reread(self, after: int = 0) -> list[Row]:
        """Take the line that opened a cell for damaged, and read those after it by themselves.

        The last of them stands `after` lines before the one that is being read.
        """
        lines, self._open, self._length = self._open, [], 0
        last = len(lines) - 1 + after
        self._damage.append((last, "belongs to a quoted cell without end"))
        rows: list[Row] = []
        for number, line in enumerate(lines[1:], start=1):
            known = len(self._damage)
            rows += self.read(line)
            self._damage[known:] = [(last - number + more, what) for more, what in self._damage[known:]]
        return rows

    def _is_row(self, line: str) -> bool:
        """Whether a line within a quoted cell is a row of its own, so that the cell was never closed."""
        try:
            cells = self._cells(line)
        except ValueError:
            return False
        return self._header is not None and len(cells) == len(self._header) and any(map(_is_number, cells))

    def _rows(self, text: str) -> list[Row]:
        if self._header is None:
            self._delimiter = delimiter_of(text)
            self._header = [name.strip() for name in self._cells(text)]
            return []
        if not text:
            return []
        cells = self._cells(text)
        if self._is_header(cells):  # of a run that was resumed into the same file
            self._header = [cell.strip() for cell in cells]
            return []
        if len(cells) != len(self._header):
            raise ValueError(f"is not a row of this CSV file: {len(cells)} cells under {len(self._header)} names")
        return [
            {
                name: None if cell in _NOTHING else cell
                for name, cell in zip(self._header, cells, strict=True)
                if cell and name
            }
        ]

    def _is_header(self, cells: list[str]) -> bool:
        if any(map(_is_number, cells)):
            return False
        names = [cell.strip() for cell in cells]
        return names == self._header or sum(is_known(name) or name in STEPS for name in names) > 1

    def _cells(self, text: str) -> list[str]:
        if '"' not in text:
            return text.split(self._delimiter)
        try:
            return next(csv.reader([text.replace("\n", " ")], delimiter=self._delimiter))
        except csv.Error as error:
            raise ValueError(f"is not a row of this CSV file ({error})") from error


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def delimiter_of(header: str) -> str:
    """Return what separates the names of a header."""
    return max(DELIMITERS, key=header.count)


def names_of(header: str) -> list[str]:
    """Return the names of a header; [] where it cannot be read."""
    try:
        cells = next(csv.reader([header], delimiter=delimiter_of(header)), [])
    except csv.Error:
        return []
    return [name.strip() for name in cells]


def is_long(names: list[str]) -> bool:
    """Return whether a table has one row per metric and step."""
    return _LONG.issubset(names)


class LongTable(Log):
    """A table with one row per metric and step: `key, value, step`, and `run_id` where it holds several runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._table = LineLog(path, CsvFormat)
        self.notes = self._table.notes

    def rows(self) -> Iterator[Row]:  # noqa: D102
        runs: dict[str, dict[int, Row]] = {}
        self._table.on_share = self.on_share
        tally = Tally(self.notes, "step")
        for row in self._table.rows():
            run = str(row.get("run_id") or row.get("run_uuid") or row.get("run_name") or "")
            key = row.get("key")
            try:
                step = int(float(str(row.get("step"))))
            except (ValueError, OverflowError):
                tally.bad(f"{self._table.place}step must be a whole number, got {str(row.get('step'))[:200]!r}")
                continue
            tally.good += 1
            if key:
                runs.setdefault(run, {}).setdefault(step, {"step": step})[str(key)] = row.get("value")
        tally.settle()
        for run, steps in runs.items():
            for step in sorted(steps):
                row = steps[step]
                yield row if len(runs) == 1 else _of_run(run, row)


def _of_run(run: str, row: Row) -> Row:
    return {key if key == "step" else f"{run} - {key}": value for key, value in row.items()}
