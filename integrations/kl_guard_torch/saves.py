"""The checkpoints of a loop: each complete, under its name by one rename, the oldest let go."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kl_guard.checkpoints.manifest import size_of
from kl_guard.checkpoints.soundness import problems
from kl_guard.paths import sync, unused
from kl_guard.progress import counted, for_rank
from kl_guard_torch import ranks

logger = logging.getLogger("kl_guard")

DRAFT = ".saving-"


class Saves:
    """Checkpoints in `<folder>/checkpoint-N`.

    Parameters
    ----------
    folder:
        Where they are; every process must see it.
    keep:
        How many are kept, None for all. The guard's pins are not among them.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder = folder
        self._keep = keep

    def folder_of(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self.folder / f"checkpoint-{step}"

    def present(self) -> dict[int, Path]:
        """Return the checkpoints that are there, by step."""
        matches = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in self.folder.glob("checkpoint-*"))
        return {int(match[1]): path for match, path in matches if match and path.is_dir()}

    def newest_sound(self) -> Path | None:
        """Return the newest checkpoint whose files are whole."""
        for _, path in sorted(self.present().items(), reverse=True):
            wrong = whats_wrong(path)
            if wrong is None:
                return path
            logger.warning("kl-guard: %s is passed over: %s", path, wrong)
        return None

    def clean(self) -> None:
        """Remove what an interrupted save left."""
        for draft in self.folder.glob(f"{DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)

    def put_earlier_aside(self) -> None:
        """Rename checkpoints of an earlier run, so that they are not taken for those of the one that begins."""
        for path in self.present().values():
            path.rename(unused(path.with_name(f"earlier-{path.name}")))

    def write(self, target: Path, write: Callable[[Path], Any], put_aside: Callable[[Path], Any]) -> str:
        """Let every process write its part, and give the whole its name; return what went wrong, "" if nothing.

        Every process must call this, and each returns the same. What lies in `target` already goes to `put_aside`.
        """
        draft = target.parent / f"{DRAFT}{target.name}"
        why = ""
        if ranks.rank() == 0:
            why = _tried(_prepare, draft)
        why = ranks.gather(why)[0] or _tried(write, draft) or _tried(_sync, draft)
        told = [text for text in ranks.gather(why) if text]
        if ranks.rank() == 0:
            if not told:
                told = [text for text in [_tried(_name, draft, target, put_aside)] if text]
            shutil.rmtree(draft, ignore_errors=True)
        return next(iter(ranks.gather(told)[0]), "")

    def thin_out(self) -> None:
        """Delete the oldest beyond `keep`."""
        if self._keep is not None:
            for _, path in sorted(self.present().items())[: -self._keep]:
                shutil.rmtree(path, ignore_errors=True)


def _prepare(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def _sync(draft: Path) -> None:
    for file in draft.rglob("*"):
        sync(file)


def _name(draft: Path, target: Path, put_aside: Callable[[Path], Any]) -> None:
    sync(draft)
    if target.exists():
        put_aside(target)
    draft.rename(target)
    sync(target.parent)


def _tried(work: Callable[..., Any], *args: Any) -> str:
    try:
        work(*args)
    except Exception as error:
        return f"{error}" or repr(error)
    return ""


def whats_wrong(folder: Path) -> str | None:
    """Return what is wrong with the files of a checkpoint; a large one shows how far it is."""
    with for_rank(ranks.rank())(f"checking {folder.name}") as told:
        return next(problems(folder, on_bytes=counted(told, size_of(folder))), None)
