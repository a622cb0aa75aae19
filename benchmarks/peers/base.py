"""What every peer has in common: how it is asked, and what it answers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Alarm:
    """The first alarms of one peer on one series; each step is that at which the peer spoke."""

    critical_step: int | None = None
    warn_step: int | None = None
    onset_step: int | None = None
    error: str | None = None


class Peer(Protocol):
    """A peer tool with its settings.

    `live` is False for a tool that only reads whole logs and is re-run here on each prefix; `every` is its number of
    steps between two looks; `counted` names the detectors whose alarms count.
    """

    name: str
    version: str
    live: bool
    every: int
    counted: tuple[str, ...]

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first critical alarm."""


def installed(name: str) -> str | None:
    """Return the installed version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def renamed(row: Mapping[str, float | None], names: Mapping[str, str]) -> dict[str, float]:
    """Return the logged values of a row under the names a peer gives them."""
    return {name: value for column, name in names.items() if (value := row.get(column)) is not None}


def step_of(row: Mapping[str, float | None], index: int) -> int:
    """Return the step of a row, or its place where it has none."""
    step = row.get("step")
    return index + 1 if step is None else int(step)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what peers print and their numeric warnings."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


class Errors(logging.Handler):
    """Collects what a peer logs about its own failures instead of raising."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def errors_of(logger_name: str) -> Iterator[list[str]]:
    """Divert the warnings of a logger into a list."""
    logger, handler = logging.getLogger(logger_name), Errors()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
