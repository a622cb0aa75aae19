"""The reference model that moves (`sync_ref_model`): no checkpoint holds it, so the guard adds it to each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model

NAME = "kl_guard_reference.safetensors"


def moves(trainer: Any) -> bool:
    """Return whether this trainer moves its reference towards the policy."""
    return bool(getattr(trainer.args, "sync_ref_model", False)) and getattr(trainer, "ref_model", None) is not None


def save(trainer: Any, checkpoint: Path) -> None:
    """Put the reference into a checkpoint's folder, by one rename.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    draft = checkpoint / f".{NAME}"
    save_model(trainer.ref_model, str(draft))
    draft.rename(checkpoint / NAME)


def restore(trainer: Any, checkpoint: Path) -> bool:
    """Load the reference that a checkpoint holds; return whether it holds one.

    Raises
    ------
    OSError, RuntimeError
        If it cannot be read or does not fit.
    """
    if not (checkpoint / NAME).is_file():
        return False
    load_model(trainer.ref_model, str(checkpoint / NAME))
    return True
