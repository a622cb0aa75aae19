"""How much the terminal can show."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TextIO

USAGE = 2  # the status of a usage error, or of what cannot be read or written
NARROWEST = 20
COLOURS = {"critical": "31;1", "warn": "33", "info": "36", "good": "32", "dim": "2"}


def width() -> int:
    """Return how many columns there are."""
    return max(NARROWEST, shutil.get_terminal_size((100, 24)).columns)


def in_colour() -> bool:
    """Return whether colours are wanted: on a terminal, unless `NO_COLOR` is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plain() -> bool:
    """Return whether only ASCII can be shown."""
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def painted(text: str, colour: str) -> str:
    """Return text in a colour of `COLOURS`, where colours are wanted."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if in_colour() else text


def shown(text: str) -> str:
    """Return text from a log or a model with what a terminal would obey made visible."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def in_one_line(text: str) -> str:
    """Return the same for a name: ends of lines are made visible too."""
    return shown(text).replace("\n", "\\n")


def path(text: str) -> str:
    """Return a path that was given on the command line, as the type of an argument.

    Raises
    ------
    argparse.ArgumentTypeError
        For an empty one, which would be the folder one is in.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def wrapped(text: str, indent: str = "  ") -> str:
    """Return text in lines that fit, all but the first indented."""
    return "\n".join(
        textwrap.fill(line, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in shown(text).splitlines()
    )


def say(text: str, *, to: Literal["stdout", "stderr"] = "stdout", end: str = "\n") -> None:
    """Print what can be printed: a stream that is full, or that nobody reads, costs its text and nothing else."""
    stream: TextIO = getattr(sys, to)
    try:
        print(text + end, end="", file=stream, flush=True)  # one write, so that no other comes between
    except (OSError, ValueError):
        let_go(stream)


def complain(error: Exception) -> None:
    """Say in one line on standard error what is wrong."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = " ".join(str(error).split()) or repr(error)
    say(in_one_line(f"kl-guard: error: {text}"), to="stderr")


def let_go(stream: TextIO) -> None:
    """Let what cannot be printed any more go nowhere, instead of failing once more at the very end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextmanager
def listening() -> Iterator[None]:
    """Print what the guard logs, such as warnings of its own, on standard error."""
    import logging

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(shown(self.format(record)), to="stderr")

    logger, printer = logging.getLogger("kl_guard"), Printer()
    logger.addHandler(printer)
    try:
        yield
    finally:
        logger.removeHandler(printer)
