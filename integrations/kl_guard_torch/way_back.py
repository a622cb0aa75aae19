"""Going back in a loop: files made ready, everything restored in place, changed, and checked."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from kl_guard import Checkpoint, Decision, Finding, KLGuard
from kl_guard_torch import ranks
from kl_guard_torch.changes import RollbackContext, change
from kl_guard_torch.facts import RestoreFailed, differences
from kl_guard_torch.faults import Faults
from kl_guard_torch.going_back import settle
from kl_guard_torch.saves import Saves, whats_wrong
from kl_guard_torch.state import TrainingState

logger = logging.getLogger("kl_guard")

T = TypeVar("T")


class WayBack:
    """The way back of one loop; everything is called by every process.

    Parameters
    ----------
    state, saves, guard, faults:
        Of the loop.
    on_rollback:
        What to change after a rollback, instead of what the configuration says.
    """

    def __init__(
        self,
        state: TrainingState,
        saves: Saves,
        guard: KLGuard,
        faults: Faults,
        on_rollback: Callable[[RollbackContext], Any] | None,
    ) -> None:
        self._state = state
        self._saves = saves
        self._guard = guard
        self._faults = faults
        self._on_rollback = on_rollback

    def go(self, decided: Decision) -> int:
        """Go back as decided; return the step.

        Raises
        ------
        RestoreFailed
            If there is nothing sound to go back to, or a check failed.
        """
        found = None
        if ranks.rank() == 0:
            found = self._faults.guarded(self._guard.go_back, self._saves.folder_of, self._saves.present())
        target = self._faults.shared(found)[0]
        if target is None:
            raise RestoreFailed("there is nothing sound to go back to any more")
        try:
            step = self.load(Path(target.path))
        except Exception as error:
            raise RestoreFailed(f"{target.path} could not be loaded: {error}") from error
        self._guard.rolled_back(target.step)
        self.restored(target, decided.reason)
        return step

    def load(self, folder: Path) -> int:
        """Read a checkpoint, and only when every process has, put it in place; return its step.

        Raises
        ------
        ValueError
            If a process cannot read it, or it does not fit the model.
        """
        read = self._together(functools.partial(self._read, folder))
        try:
            return self._together(functools.partial(self._state.put, read))
        except ValueError as error:
            raise ValueError(f"{folder} does not fit what is trained: {error}") from error

    def _read(self, folder: Path) -> dict[str, Any]:
        wrong = whats_wrong(folder)
        if wrong is not None:
            raise ValueError(wrong)
        return self._state.read(folder)

    def _together(self, work: Callable[[], T]) -> T:
        """Do something on every process; where one fails, all raise what it says."""
        result, why = None, ""
        try:
            result = work()
        except Exception as error:
            why = f"{error}" or repr(error)
        told = [text for text in self._faults.shared(why) if text]
        if told or result is None:
            raise ValueError(told[0] if told else why)
        return result

    def known(self, step: int, folder: Path) -> Checkpoint | None:
        """Return the guard's checkpoint of a step, where `folder` is one of this run's, or a pin of one."""
        checkpoint = self._guard.checkpoints.get(step)
        if checkpoint is None or self._guard.folder is None:
            return None
        places = [Path(checkpoint.path), self._saves.folder_of(step), self._guard.folder / "pins" / f"step-{step}"]
        return checkpoint if folder.resolve() in [place.resolve() for place in places] else None

    def restored(self, checkpoint: Checkpoint, reason: Finding | None) -> None:
        """Change what is to be done otherwise, and compare what was loaded with what was saved.

        Raises
        ------
        RestoreFailed
            On all processes, when a check failed on any; the message names it.
        """
        context = RollbackContext(
            attempt=self._guard.attempt,
            checkpoint=checkpoint,
            reason=reason,
            config=self._guard.config,
            optimizers=list(self._state.optimizers.values()),
            schedulers=[self._state.schedulers.get(name) for name in self._state.optimizers],
            held=self._guard.changes_in(checkpoint),
            base_seed=torch.initial_seed() % 2**32,
        )
        failed: list[str] = []
        try:
            change(context, self._on_rollback)
            failed = self._check(checkpoint, context.changes.learning_rate / context.held.learning_rate)
        except Exception as error:
            logger.exception("kl-guard: a fault in restoring")
            failed = [f"a fault in restoring: {error!r}"]
        settle(self._guard, checkpoint, context, failed, share=self._faults.shared, unchecked="not checked")
        if context.seed is not None:
            self._reseed(context.seed)

    def _check(self, checkpoint: Checkpoint, lr_factor: float) -> list[str]:
        expected = dict(checkpoint.facts)
        weights = expected.pop("weights", [])
        if len(weights) == ranks.world_size():
            expected["weights"] = weights[ranks.rank()]
        return list(differences(expected, self._state.facts(checkpoint.step), lr_factor))

    def _reseed(self, seed: int) -> None:
        """Begin other noise, on each process its own."""
        torch.manual_seed(seed + ranks.rank())
        for number, generator in enumerate(self._state.generators.values(), start=1):
            generator.manual_seed(seed + ranks.rank() + 1_000_003 * number)
