"""Trackers kept on this machine, and what they have written, read back from their files."""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kl_guard.journal import read_journal

Row = tuple[int, dict[str, float]]
"""A step, and the figures of the guard that were logged for it, without what frameworks put before their names."""

MEANS = {
    "kl_mean": "kl_mean",
    "kl_token_mean": "kl_token_mean",
    "top_share": "top_share",
    "kl_without_special": "kl_without_special",
}
SPECIAL = "kl_without_special"  # in TRL, where the tokenizer says which tokens are special
LARGEST = {"kl_max": "kl_max", "log_ratio_max": "log_ratio_extreme"}
"""What is logged of a window of steps, and what the guard's journal calls it."""

BLOCK = 32768  # of the record format that W&B shares with LevelDB
HEADER = struct.Struct("<IHB")  # checksum, length, kind: whole, first, middle or last part
WHOLE, FIRST, LAST = 1, 2, 4


@contextmanager
def local(folder: Path) -> Iterator[None]:
    """Let W&B and trackio write into a folder, and nothing leave this machine."""
    reached: list[Any] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:  # W&B speaks with its own process
            refused(address)
        connect(self, address)

    def refused(*address: Any, **_: Any) -> None:
        reached.append(address)
        raise OSError(f"a tracker reached out to {address}")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_CONSOLE": "off",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_X_DISABLE_STATS": "true",
        }.items():
            patch.setenv(name, value)
        for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(folder))
        for name in ("WANDB_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        for module in list(sys.modules.values()):  # read once, when trackio is imported
            if getattr(module, "__name__", "").partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
                patch.setattr(module, "TRACKIO_DIR", folder / "trackio")
        patch.setattr(socket.socket, "connect", watched)
        patch.setattr(socket, "getaddrinfo", refused)
        try:
            yield
        finally:
            if "wandb" in sys.modules:
                sys.modules["wandb"].teardown()  # ends its process, and lets the next run see the next folder
            assert not reached
            assert "gradio" not in sys.modules


def tensorboard(folder: Path) -> list[Row]:
    """Return the rows of the only event file below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    of_names = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    rows: list[Row] = []
    levels = next(points for tag, points in of_names.items() if tag.endswith("kl_guard/level"))
    places = dict.fromkeys(of_names, 0)
    for step, _ in levels:  # each name has its points in order; a step may come again after a rollback
        row = {}
        for tag, points in of_names.items():
            if places[tag] < len(points) and points[places[tag]][0] == step:
                row[tag] = points[places[tag]][1]
                places[tag] += 1
        rows.append((step, _ours(row)))
    return rows


def wandb(folder: Path, step: str) -> list[Row]:
    """Return the rows of the only offline run below a folder; `step` is the name under which a framework logs it."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.finish()
    wandb.teardown()  # waits for its process, which may still be writing
    (path,) = folder.rglob("run-*.wandb")
    rows = []
    for data in wandb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            rows.append((row.get(step), _ours(row)))
    return [(step, row) for step, row in rows if row]


def trackio(project: str, step: str) -> list[Row]:
    """Return the rows of the only run of a project."""
    from trackio import Api, SQLiteStorage

    (run,) = Api().runs(project)
    rows = [(row[step], _ours(row)) for row in SQLiteStorage.get_logs(project, run_id=run.id) if step in row]
    return [(step, row) for step, row in rows if row]


def observed(folder: Path, attempt: int = 0) -> dict[int, dict[str, Any]]:
    """Return what the guard observed in each step of an attempt, from its journal and its file of tokens."""
    records, _ = read_journal(folder / "kl_guard" / "journal.jsonl")
    mine = [r for r in records if r["type"] == "observation" and r["attempt"] == attempt]
    steps = {record["step"]: record for record in reversed(mine)}  # the first of each step; others add to it
    path = folder / "kl_guard" / "tokens.jsonl"
    for tokens in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
        if tokens["attempt"] == attempt and tokens["step"] in steps:
            steps[tokens["step"]][SPECIAL] = tokens[SPECIAL]
    return steps


def window(steps: dict[int, dict[str, Any]], first: int, last: int, level: float) -> Row:
    """Return what is to be logged for the steps from first to last."""
    window = [steps[step] for step in range(first, last + 1)]
    row = {"level": level, "spikes": 0.0}
    for names, together in ((MEANS, lambda values: sum(values) / len(values)), (LARGEST, max)):
        for name, field in names.items():
            values = [record[field] for record in window if record.get(field) is not None]
            if values:
                row[name] = together(values)
    return last, row


def close(rows: list[Row]) -> list[Any]:
    """Return rows to compare others with: TensorBoard keeps 32 bits."""
    return [(step, pytest.approx(row, rel=1e-6)) for step, row in rows]


def _ours(row: dict[str, Any]) -> dict[str, float]:
    return {name.partition("kl_guard/")[2]: float(value) for name, value in row.items() if "kl_guard/" in name}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B run file; this version of W&B has no reader of its own."""
    assert data.startswith(b":W&B")
    at, parts = HEADER.size, b""
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:  # the rest of a block is filled up
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        parts = data[at : at + length] if kind in (WHOLE, FIRST) else parts + data[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            yield parts
