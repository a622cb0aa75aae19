"""Moving checkpoints aside that the run has gone back behind: out of sight of "resume from the last one"."""

from __future__ import annotations

import logging
from pathlib import Path

from kl_guard.paths import unused

logger = logging.getLogger("kl_guard")


class Quarantine:
    """Keeps what was moved aside in `<folder>/attempt-A-<name>`; nothing is deleted, nothing overwritten.

    The name begins otherwise than a checkpoint's, so that no trainer takes it for one.

    Parameters
    ----------
    folder:
        Where it goes; made when first needed. On the file system of the checkpoints, since moving must not copy.
    within:
        Folders elsewhere are left alone, whatever a journal says of them.
    """

    def __init__(self, folder: Path, within: Path) -> None:
        self.folder = folder
        self._within = within

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    def take(self, path: Path, attempt: int, *, name: str | None = None) -> Path | None:
        """Move a folder aside, by one rename; return where it is now, None where it was not there or could not be."""
        try:
            if not path.exists():
                return None
            if not path.parent.resolve().is_relative_to(self._within.resolve()):  # a link itself may be moved
                logger.warning("kl-guard: %s lies outside of %s and is left where it is", path, self._within)
                return None
            self.folder.mkdir(parents=True, exist_ok=True)
            target = unused(self.folder / f"attempt-{attempt}-{name or path.name}")
            path.rename(target)
        except (OSError, ValueError) as error:
            logger.warning("kl-guard: %s cannot be moved aside: %s", path, error)
            return None
        return target
