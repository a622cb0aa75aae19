"""`trainer_state.json` of transformers and TRL, alone or in a checkpoint folder; other JSON files that hold rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kl_guard.logs.base import Log, Row
from kl_guard.logs.text import EVERY, open_binary
from kl_guard.names import is_known
from kl_guard.reading import seconds_in

STATE = "trainer_state.json"
LARGEST = 2**28  # bytes, unpacked, which is some million logs: a small archive could fill the memory


class TrainerState(Log):
    """The log history of a trainer: each training log with the steps that it averages.

    Logs of evaluations (`eval_*`) and the summary at the end of the run are no steps of training.
    """

    none_is_nan = True  # TRL leaves NaN out before it averages: None is a window of nothing but NaN

    def __init__(self, path: Path, history: list[Row] | None = None) -> None:
        super().__init__(path)
        self._history = history  # where it was read already, for the first call of `rows`

    def rows(self) -> Iterator[Row]:  # noqa: D102
        last = 0
        history, self._history = self._history or read_history(self.path), None
        for number, row in enumerate(history):
            if self.on_share is not None and not number % EVERY:
                self.on_share(number / len(history))
            if "train_runtime" in row:
                self.seconds = max(self.seconds, seconds_in(row, "train_runtime"))
                continue
            if not any(map(is_known, row)):
                continue
            step = row.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                row = {**row, "window": max(1, step - last)}
                last = step
            yield row


def read_history(path: Path) -> list[Row]:
    """Return the log history of a JSON file, or the rows where it is a list of them.

    Raises
    ------
    ValueError
        When it is not JSON, or holds neither; the message has the path, and the line where there is one.
    """
    try:
        with open_binary(path) as file:
            data = file.read(LARGEST + 1)
            if len(data) > LARGEST:
                raise ValueError(f"it is larger than {LARGEST >> 20} MB")
            whole: Any = json.loads(data.decode("utf-8-sig", "replace"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno} is not JSON ({error.msg})") from error
    except (ValueError, RecursionError, EOFError) as error:
        raise ValueError(f"{path}: not JSON that can be read ({error})") from error
    rows = whole.get("log_history") if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise ValueError(f"{path}: JSON without a log_history; it has: {', '.join(sorted(whole)[:40]) or 'nothing'}")
    return [row for row in rows if isinstance(row, dict)]


def in_folder(folder: Path) -> Iterator[Path]:
    """Yield the states of a checkpoint or an output folder, the newest first."""
    if (folder / STATE).is_file():
        yield folder / STATE
    steps = {
        int(found[1]): path for path in folder.iterdir() if (found := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    for step in sorted(steps, reverse=True):
        if (steps[step] / STATE).is_file():
            yield steps[step] / STATE
