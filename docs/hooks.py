"""What mkdocs does with each page: tables of knobs come from the help texts of `GuardConfig`."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from kl_guard import GuardConfig

MARKER = re.compile(r"<!-- knobs(?:: ([\w, ]+))? -->")


def table(names: list[str] | None = None) -> str:
    """Return a table of knobs: name, default, help text; all of them where no names are given.

    Raises
    ------
    ValueError
        For a name that is no knob.
    """
    knobs = {knob.name: knob for knob in fields(GuardConfig)}
    if unknown := [name for name in names or () if name not in knobs]:
        raise ValueError(f"GuardConfig has no knob {', '.join(unknown)}")
    lines = ["| knob | default | what it does |", "|---|---|---|"]
    for name in names or knobs:
        default = knobs[name].default
        shown = "" if default is MISSING else f"`{default!r}`"
        text = str(knobs[name].metadata.get("help", "")).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{name}` | {shown} | {text} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where `<!-- knobs -->` or `<!-- knobs: ratio, sustain -->` stands."""

    def fill(marker: re.Match[str]) -> str:
        names = [name.strip() for name in marker[1].split(",")] if marker[1] else None
        return table(names)

    return MARKER.sub(fill, markdown)
