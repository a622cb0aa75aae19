"""What every reader of logs gives, and the reader of files that are read line by line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kl_guard.config import KLKind
from kl_guard.logs.text import Lines, Notes
from kl_guard.progress import Told

Row = dict[str, Any]


class Log(ABC):
    """A recorded run: rows of metrics by the names that the trainer gave them.

    `notes` collect what was peculiar. `none_is_nan` says that None stands for a mean of nothing but NaN, `may_round`
    that values were printed for people, `kind` which KL it is where the log itself says so, `seconds` how long the run
    took where no row that is given says so. While rows are read, `on_share` is now and then told the share that was.
    """

    none_is_nan = False
    may_round = False
    kind: KLKind | None = None
    rounded = False
    seconds = 0.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = Notes()
        self.on_share: Told | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Yield the rows, from the beginning at each call.

        Raises
        ------
        ValueError
            For what cannot be read; the message has the path, and the line where there are lines.
        """

    def without_kl(self, names: list[str]) -> str:
        """Return the complaint about a log that has only these names."""
        return without_kl(names)

    @property
    def place(self) -> str:
        """Where the row given last stands, for messages."""
        return f"{self.path}: "


def without_kl(names: list[str]) -> str:
    """Return the complaint about a log that has only these names."""
    return f"no KL in this log; it has: {', '.join(names) or 'nothing'}"


class LineFormat(ABC):
    """How one line becomes rows; what earlier lines said, such as a header, is kept."""

    none_is_nan = False
    may_round = False

    def without_kl(self, names: list[str]) -> str:
        """Return the complaint about a log that has only these names."""
        return without_kl(names)

    @abstractmethod
    def parse(self, line: str) -> list[Row]:
        """Return the rows of a line.

        Raises
        ------
        ValueError
            When the line is none of this format; the message says what is wrong, without path and number.
        """


class LineLog(Log):
    """A log that is read line by line.

    A last line without an end that cannot be read is torn: the run is still writing it, or was killed. Where it was
    resumed into the same file, such a line stands in the middle: it is left out, as long as most lines can be read.
    """

    def __init__(self, path: Path, make_format: Callable[[], LineFormat]) -> None:
        super().__init__(path)
        self._make_format = make_format
        self._lines = Lines(path, self.notes)
        form = make_format()
        self._without_kl = form.without_kl
        self.none_is_nan, self.may_round = form.none_is_nan, form.may_round

    def rows(self) -> Iterator[Row]:  # noqa: D102
        self.notes.clear()
        form = self._make_format()
        good = bad = 0  # lines that gave rows, lines that could not be read
        first = ""  # what was wrong with the first bad one
        self._lines.on_share = self.on_share
        for line in self._lines:
            try:
                found = form.parse(line)
            except ValueError as error:
                where = f"{self.path}: line {self._lines.number} "
                if good and self._lines.torn:
                    self.notes.add("torn", f"{where}is torn; it is left out")
                    break
                if not good:
                    raise ValueError(f"{where}{error}") from error
                first = first or f"{where}{error}"
                bad += 1
                self.notes.add("damaged", f"{where}{error}; it is left out")
                continue
            good += bool(found)
            yield from found
        if bad >= good > 0:
            raise ValueError(f"{first} (and {bad - 1} more like it)" if bad > 1 else first)

    def without_kl(self, names: list[str]) -> str:  # noqa: D102
        return self._without_kl(names)

    @property
    def place(self) -> str:  # noqa: D102
        return f"{self.path}: line {self._lines.number}, "
