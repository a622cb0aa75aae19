"""What the trainer saves: seen where every save passes, after its file is written."""

from __future__ import annotations

import functools
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kl_guard.checkpoints.manifest import base_of, files_of
from kl_guard_torch.faults import Faults

ASIDE = ".kl-guard-before"


class Saves:
    """Stands in for a trainer's `save_checkpoint` during a fit, and says what was saved.

    `ModelCheckpoint` and every other callback save through it, on all ranks, whatever they call their files. A file
    that is to be written over is moved out of the way first where it is one with a pin (a hard link): some file systems
    are written to in place, and the pin would change with it.

    Parameters
    ----------
    faults:
        Keeps faults of the guard inside.
    saved:
        Called with the path after each complete save that training can go on from. On all ranks.
    """

    def __init__(self, faults: Faults, saved: Callable[[Path], Any]) -> None:
        self.written: dict[Path, int] = {}
        """Step of each file that was written, by path, the newest last."""
        self._faults = faults
        self._saved = saved
        self._trainer: Any = None
        self._save: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.written)} written)"

    def watch(self, trainer: Any) -> None:
        """Begin to look at what this trainer saves."""
        self.leave()
        self._trainer, self._save = trainer, trainer.save_checkpoint
        original = trainer.save_checkpoint

        @functools.wraps(original)
        def save_checkpoint(filepath: Any, weights_only: bool | None = None, *args: Any, **kwargs: Any) -> Any:
            writes = bool(trainer.is_global_zero)
            aside = self._faults.guarded(_out_of_the_way, filepath) if writes else None
            self._faults.shared(None)  # of a folder every rank writes a part: nobody begins before that is done
            try:
                result = original(filepath, weights_only, *args, **kwargs)
            except BaseException:
                if aside is not None:
                    self._faults.guarded(_back, aside, filepath)
                raise
            if aside is not None:
                self._faults.guarded(_remove, aside)
            path = self._faults.guarded(local, filepath)
            if path is not None and not weights_only:
                self.written.pop(path, None)
                self.written[path] = int(trainer.global_step)
                self._faults.guarded(self._saved, path)
            return result

        trainer.save_checkpoint = save_checkpoint

    def leave(self) -> None:
        """Give the trainer its own `save_checkpoint` back."""
        if self._trainer is not None:
            vars(self._trainer).pop("save_checkpoint", None)
            self._trainer = self._save = None

    def unseen(self, path: Path) -> None:
        """Save the trainer's state without taking it for a checkpoint of the run. Every process must call this."""
        assert self._save is not None  # noqa: S101 - only during a fit
        self._save(path)

    def forget_after(self, step: int) -> list[Path]:
        """Drop what was written at later steps; return their paths, the newest first."""
        later = [path for path, written_at in self.written.items() if written_at > step]
        for path in later:
            del self.written[path]
        return later[::-1]


def is_whole(path: Path) -> bool:
    """Return whether a file or folder is there, and not still being written: a zip archive has its list at the end."""
    return path.is_dir() or (path.is_file() and zipfile.is_zipfile(path))


def to_load(path: Path) -> Path:
    """Return what to give to `trainer.fit(ckpt_path=...)` for a checkpoint: of a pin that holds one file, that file."""
    if path.is_dir():
        names = files_of(path)
        if len(names) == 1:
            return path / names[0]
    return path


def reads_plainly(path: Path) -> bool:
    """Return whether a checkpoint in one file is made of tensors and plain values, so that nothing need be unpickled.

    Tensors stay on the disk: this looks at the list of what there is.
    """
    try:
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:
        return False
    return True


def local(path: Any) -> Path | None:
    """Return a path on this machine, made absolute; None for one elsewhere, such as s3://."""
    text = os.fspath(path)
    return None if "://" in text else Path(text).absolute()


def _out_of_the_way(filepath: Any) -> Path | None:
    """Rename a checkpoint whose files have other names too, before it is written over; return where it is now."""
    path = local(filepath)
    if path is None or path.is_symlink() or not path.exists():
        return None
    if all((base_of(path) / name).stat().st_nlink < 2 for name in files_of(path)):
        return None
    return path.replace(path.with_name(path.name + ASIDE))


def _remove(aside: Path) -> None:
    """Remove what was written over."""
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)


def _back(aside: Path, filepath: Any) -> None:
    """Put a file back where its successor could not be written."""
    path = local(filepath)
    if path is not None and not path.exists():
        aside.replace(path)
