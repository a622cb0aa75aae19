"""What going back has in common in every adapter: all processes agree on where to, and on whether it worked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kl_guard import Checkpoint, KLGuard
from kl_guard_torch import ranks
from kl_guard_torch.changes import RollbackContext
from kl_guard_torch.facts import RestoreFailed

logger = logging.getLogger("kl_guard")

C = TypeVar("C", bound=RollbackContext)


def agreed_target(
    guard: KLGuard | None, prepare: Callable[[KLGuard], Checkpoint | None], is_there: Callable[[Path], bool]
) -> Checkpoint | None:
    """Return the checkpoint that all processes go back to, None where it cannot be made; then all have given up.

    Every process must call this, one whose guard is broken too. The first one prepares the files.

    Parameters
    ----------
    guard:
        That of this process; None where it is broken.
    prepare:
        Makes the files ready for the rollback that was decided.
    is_there:
        Whether a process sees the checkpoint.
    """
    found: Checkpoint | None = None
    try:
        if guard is not None and ranks.rank() == 0:
            found = prepare(guard)
    except Exception:
        logger.exception("kl-guard: a fault of the guard itself in making files ready for going back")
    target: Checkpoint | None = ranks.gather(found)[0]
    if target is None:
        return None
    if not all(ranks.gather(guard is not None and _sees(Path(target.path), is_there))):
        if guard is not None:
            guard.give_up(f"{target.path} is not seen by every process: the nodes must share the output folder")
        return None
    if guard is not None:
        guard.rolled_back(target.step)
    return target


def settle(
    guard: KLGuard | None,
    checkpoint: Checkpoint | None,
    context: C | None,
    failed: Sequence[str],
    *,
    share: Callable[[Sequence[str]], list[Sequence[str]]] = ranks.gather,
    unchecked: str = "only its step could be checked",
) -> C:
    """Write down what was changed and say where the run is, after all processes have restored it; return `context`.

    Every process must call this.

    Parameters
    ----------
    guard, checkpoint, context:
        None only where something in `failed` says why.
    failed:
        What this process has to complain of.
    share:
        Gives what every process has, by rank.
    unchecked:
        What is said of a checkpoint that nothing was written down of.

    Raises
    ------
    RestoreFailed
        On all processes, where one has something to complain of; the message has it.
    """
    everywhere = [f"rank {rank}: {text}" for rank, texts in enumerate(share(failed)) for text in texts]
    if everywhere or guard is None or checkpoint is None or context is None:
        raise RestoreFailed("; ".join(everywhere))
    guard.changed(context.changes)
    if ranks.rank() == 0:
        logger.warning(
            "kl-guard: back at step %d (attempt %d); %s. Restored and %s",
            checkpoint.step,
            guard.attempt,
            context.describe(),
            "checked: " + ", ".join(checkpoint.facts) if checkpoint.facts else unchecked,
        )
    return context


def _sees(path: Path, is_there: Callable[[Path], bool]) -> bool:
    try:
        return is_there(path)
    except OSError:
        return False
