"""What an attacker would put in the place of a file: pickles that leave a mark where they are run."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def as_torch(path: Path, mark: Path, inside: dict | None = None) -> None:
    """Put a bomb into a file of `torch.save`, beside what is there."""
    torch.save({**(inside or {}), "bomb": Bomb(mark)}, path)


def as_pickle(path: Path, mark: Path) -> None:
    """Put a bare pickle in the place of a file."""
    path.write_bytes(pickle.dumps(Bomb(mark), protocol=2))
