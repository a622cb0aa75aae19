"""Whether a checkpoint more has room on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

MOMENTS = 8  # bytes of optimizer state for each trained parameter: two Adam moments in float32
SAFETY = 2.0


def why_no_room(folder: Path, model: Any) -> str:
    """Make a folder; return why a checkpoint of the model cannot be kept there, "" where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return f"{folder} cannot be written"
        need = SAFETY * bytes_of(model)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be written ({error})"
    if free < need:
        return f"it may take {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return ""


def bytes_of(model: Any) -> int:
    """Return about how large a checkpoint of the model is; with PEFT only what is trained is saved."""
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = trained if hasattr(model, "peft_config") else list(model.parameters())
    return int(sum(p.numel() * p.element_size() for p in saved) + MOMENTS * sum(p.numel() for p in trained))
