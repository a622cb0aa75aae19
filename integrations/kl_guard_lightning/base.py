"""What a callback and a checkpoint callback are, in whichever of Lightning's two packages is installed.

`lightning.pytorch` and `pytorch_lightning` are the same code under two names, with classes of their own. One callback
that is both can be given to a trainer of either.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

NAMES = ("lightning.pytorch", "pytorch_lightning")


def _installed() -> list[ModuleType]:
    """Import those that are there.

    Raises
    ------
    ModuleNotFoundError
        Where there is none.
    """
    found = []
    for name in NAMES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in {name, name.partition(".")[0]}:
                raise
    if not found:
        raise ModuleNotFoundError("neither of Lightning's packages is installed", name="lightning")
    return found


PACKAGES = _installed()

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
else:
    Callback = type("Callback", tuple(package.Callback for package in PACKAGES), {"__module__": __name__})

_CHECKPOINTS: tuple[type[Any], ...] = tuple(package.callbacks.Checkpoint for package in PACKAGES)
_TRAINERS: tuple[type[Any], ...] = tuple(package.Trainer for package in PACKAGES)


def saves_checkpoints(callback: Any) -> bool:
    """Return whether a callback is one of those that save checkpoints; trainers run them last."""
    return isinstance(callback, _CHECKPOINTS)


def is_trainer(trainer: Any) -> bool:
    """Return whether this is a trainer of one of the packages."""
    return isinstance(trainer, _TRAINERS)
