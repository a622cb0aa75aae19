"""What every reader of logs gives, and the reader of files that are read line by line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kl_guard.config import KLKind
from kl_guard.logs.tally import Tally
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

    def __init__(self) -> None:
        self._damage: list[tuple[int, str]] = []

    def without_kl(self, names: list[str]) -> str:
        """Return the complaint about a log that has only these names."""
        return without_kl(names)

    def read(self, line: str) -> list[Row]:
        """Return the rows that are known with this line; what is wrong is told by `damage`."""
        try:
            return self.parse(line)
        except ValueError as error:
            self._damage.append((0, str(error)))
            return []

    def damage(self) -> list[tuple[int, str]]:
        """Return, once, which lines could not be read: how many lines before the last one, and what is wrong."""
        damage, self._damage = self._damage, []
        return damage

    def finish(self) -> list[Row]:
        """Return the rows that waited for lines that did not come."""
        return []

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
        form, tally = self._make_format(), Tally(self.notes)
        self._lines.on_share = self.on_share
        for line in self._lines:
            found = form.read(line)
            self._count(form, tally, len(found))
            yield from found
        found = form.finish()
        self._count(form, tally, len(found))
        yield from found
        tally.settle()

    def _count(self, form: LineFormat, tally: Tally, found: int) -> None:
        tally.good += found
        for back, what in form.damage():
            place = f"{self.path}: line {self._lines.number - back}"
            if back == 0 and self._lines.torn and tally.good:
                self.notes.add("torn", f"{place} is torn; it is left out")
            else:
                tally.bad(f"{place} {what}")

    def without_kl(self, names: list[str]) -> str:  # noqa: D102
        return self._without_kl(names)

    @property
    def place(self) -> str:  # noqa: D102
        return f"{self.path}: line {self._lines.number}, "
