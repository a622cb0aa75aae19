"""Tables for the terminal: texts are folded where there is little room, numbers and words never."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kl_guard.cli import terminal

WORD = 26  # characters of a word that is not broken; the longest name of a signature
MOST = 200  # characters of a cell
BETWEEN = 2  # blanks between columns


def table(columns: Mapping[str, bool], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table as wide as the terminal, or wider where its numbers and words take more.

    Parameters
    ----------
    columns:
        The headings, and whether texts stand under each; else numbers, to the right.
    rows:
        The cells; "-" is shown for None.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[terminal.in_one_line("-" if cell is None else str(cell))[:MOST] for cell in row] for row in rows]
    shown = Table(box=None, pad_edge=False)
    needed = 0
    for place, (name, texts) in enumerate(columns.items()):
        column = [name, *(row[place] for row in cells)]
        if texts:
            words = (len(word) for text in column[1:] for word in text.split())
            least = max(len(name), min(WORD, max(words, default=1)))
            shown.add_column(name, overflow="fold", min_width=least)
        else:
            least = max(map(len, column))
            shown.add_column(name, justify="right", no_wrap=True)
        needed += least + BETWEEN
    for row in cells:
        shown.add_row(*map(Text, row))
    width = max(terminal.width(), needed)
    console = Console(width=width, no_color=not terminal.in_colour(), highlight=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
