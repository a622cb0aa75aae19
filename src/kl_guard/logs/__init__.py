"""Readers of recorded runs: a path in, rows of metrics out."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kl_guard.logs.base import Log, Row
from kl_guard.logs.follow import Follower
from kl_guard.logs.formats import open_log

__all__ = ["Follower", "Log", "Row", "open_log", "read_rows"]


def read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Yield the rows of a log, by the names that the trainer gave its metrics.

    The kind of log is told by content: `trainer_state.json` or a folder with one, JSON lines, CSV (W&B and MLflow
    exports too), console text, TensorBoard events, the guard's own journal; compressed or not.

    Raises
    ------
    ValueError
        When it is none of them, or a line cannot be read; the message has the path, and the line.
    ImportError
        For TensorBoard events without `tensorboard`.
    OSError
        If it cannot be opened.
    """
    return open_log(path).rows()
