"""Standard input as a log: kept in a file until it is read, since what kind of log it is shows at its beginning."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kl_guard.cli.answer import Answer, Question
    from kl_guard.progress import Shown

STDIN = "-"
NAME = "standard input"


def answers(key: str | None, questions: Sequence[Question], shown: Shown) -> list[Answer]:
    """Return the answer of standard input to each question, as `kl_guard.cli.answer.answers` does for a path.

    Raises
    ------
    ValueError, TypeError, OSError
        For a log or a knob that cannot be taken, and where standard input is closed.
    """
    from kl_guard.cli.answer import answers as answers_of

    with _kept() as path:
        try:
            told = list(answers_of(str(path), key, questions, shown, checkpoints=False))
        except ValueError as error:
            raise ValueError(_renamed(str(error), path)) from error
    return [
        replace(one, log=NAME, result=replace(one.result, notes=tuple(_renamed(n, path) for n in one.result.notes)))
        for one in told
    ]


@contextmanager
def _kept() -> Iterator[Path]:
    """Yield the path of a file that has what came; it is deleted afterwards."""
    if sys.stdin is None:
        raise ValueError(f"{NAME} is closed")
    with TemporaryDirectory(prefix="kl-guard-") as folder:
        path = Path(folder, NAME)
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


def _renamed(text: str, path: Path) -> str:
    return text.replace(str(path), NAME)
