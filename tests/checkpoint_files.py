"""Folders that look like checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

LARGE = 1 << 16


def checkpoint(folder, step, size=LARGE * 2):
    """Make a checkpoint with a large file, small ones, and a sub-folder."""
    path = folder / f"checkpoint-{step}"
    (path / "sub").mkdir(parents=True)
    header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(size))
    (path / "optimizer.pt").write_bytes(os.urandom(size))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (path / "sub" / "shard-0").write_bytes(os.urandom(10))
    return path


def content(folder):
    """Relative names and bytes of all files but the manifest."""
    files = [p for p in Path(folder).rglob("*") if p.is_file() and p.name != "kl_guard_manifest.json"]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}
