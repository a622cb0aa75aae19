"""The code blocks of the documentation, and what they need around them.

A comment on a line of its own, before a block, says how it is run:

- `<!-- given: trl -->`: with the names that the function `trl` of `given.py` returns, and in the folder that it fills;
- `<!-- method: module -->`: the function that it defines is put into the class of `module`;
- `<!-- prints -->`: the block is what the one before it has logged.

Blocks of a page are run in turn and share their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
RUN = ("python", "console")
_FENCE = re.compile(
    r"^(?:<!-- (given|method|prints)(?:: (\w+))? -->\n+)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One block: its language, its text, where it begins, and the comment before it."""

    language: str
    text: str
    line: int
    marker: str = ""
    argument: str = ""


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = path.read_text()
    return [
        Block(m[3], m[4], text.count("\n", 0, m.start(4)) + 1, m[1] or "", m[2] or "") for m in _FENCE.finditer(text)
    ]


def name_of(path: Path) -> str:
    """Return a page as it is named in test ids."""
    return path.relative_to(ROOT).as_posix()


def commands_of(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with the output that is shown."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def fits(shown: str, output: str) -> bool:
    """Whether an output is the one that is shown.

    `...` stands for any text in a line, and alone on a line for any lines; blanks at the ends of lines do not count.
    """
    pattern = ""
    for line in shown.strip("\n").splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += r".*".join(re.escape(part) for part in line.rstrip().split("...")) + "\n"
    lines = "".join(f"{line.rstrip()}\n" for line in output.strip("\n").splitlines())
    return re.fullmatch(pattern, lines) is not None


def shape(text: str) -> str:
    """Return a text without its figures: what differs between machines does not count."""
    return re.sub(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", "#", text)


def not_in(output: str, shown: str) -> list[str]:
    """Return the lines of a shown output that a real one does not have, figures aside."""
    lines = {shape(line.strip()) for line in output.splitlines()}
    return [line for line in shown.splitlines() if shape(line.strip()) not in lines]


def text_with(part: str, path: Path = README) -> str:
    """Return the one text block of a page that has a part."""
    (text,) = [block.text for block in blocks_of(path) if block.language == "text" and part in block.text]
    return text
