"""Names of files and folders that must not overwrite what is there."""

from __future__ import annotations

import os
from pathlib import Path


def safe_name(text: str) -> str:
    """Return letters, digits and hyphens of `text`, 64 at most; "unknown" where none are left."""
    return "".join(c for c in text if c.isalnum() or c == "-")[:64] or "unknown"


def unused(path: Path) -> Path:
    """Return `path`, with the first free number from 2 on at the end of its stem where it is taken."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk.

    Raises
    ------
    OSError
        If the system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
