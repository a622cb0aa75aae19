"""TensorBoard event files; needs the package `tensorboard`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kl_guard.logs.base import Log, Row

EVENTS = "*tfevents*"
_MARK = b"brain.Event:"  # the first record of an event file is its version


def is_events(head: bytes) -> bool:
    """Return whether a file that begins so is an event file."""
    return _MARK in head[:64]


class EventLog(Log):
    """The scalars of one run: of an event file, or of the folder that holds the newest one."""

    def rows(self) -> Iterator[Row]:  # noqa: D102
        self.notes.clear()
        accumulator = _load(self._run())
        steps: dict[int, Row] = {}
        for tag in accumulator.Tags()["scalars"]:
            for event in accumulator.Scalars(tag):
                steps.setdefault(event.step, {"step": event.step})[tag] = event.value
        for tag in accumulator.Tags()["tensors"]:
            for event in accumulator.Tensors(tag):
                value = _scalar(event.tensor_proto)
                if value is not None:
                    steps.setdefault(event.step, {"step": event.step})[tag] = value
        for step in sorted(steps):
            yield steps[step]

    def _run(self) -> Path:
        if self.path.is_file():
            return self.path
        newest = sorted(self.path.rglob(EVENTS), key=lambda path: path.stat().st_mtime)
        folders = list(dict.fromkeys(path.parent for path in reversed(newest)))
        if len(folders) > 1:
            others = ", ".join(str(folder) for folder in folders[1:6])
            self.notes.add(
                "runs", f"{self.path}: of {len(folders)} runs the newest, {folders[0]}, is read; not: {others}"
            )
        return folders[0]


def _scalar(proto: Any) -> float | None:
    """Return the number of a tensor with one element, as newer writers log scalars."""
    from tensorboard.util import tensor_util

    try:
        array = tensor_util.make_ndarray(proto)
        return float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else None
    except Exception:
        return math.nan


def _load(path: Path) -> Any:
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError as error:
        raise ImportError(
            f"{path} holds TensorBoard events; to read them: pip install 'kl-guard[tensorboard]'", name=error.name
        ) from error
    every = dict.fromkeys((event_accumulator.SCALARS, event_accumulator.TENSORS), 0)
    try:
        return event_accumulator.EventAccumulator(str(path), size_guidance=every).Reload()
    except Exception as error:  # whatever the reader of broken files raises
        raise ValueError(f"{path}: not an event file that can be read ({error})") from error
