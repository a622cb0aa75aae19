"""Going back in a Lightning trainer: files made ready, the restored state changed and checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kl_guard import Checkpoint, Finding, GuardConfig, KLGuard, learning_rate
from kl_guard_lightning import internals, optimizers
from kl_guard_lightning.changes import RollbackContext, set_seed
from kl_guard_lightning.optimizers import Optimizers, Schedulers
from kl_guard_lightning.savers import forget_what_is_gone
from kl_guard_lightning.saves import Saves, reads_plainly, to_load
from kl_guard_torch import ranks
from kl_guard_torch.changes import change
from kl_guard_torch.facts import differences
from kl_guard_torch.going_back import agreed_target, settle

logger = logging.getLogger("kl_guard")

OnRollback = Callable[[RollbackContext], Any]


class GoingBack(Exception):  # noqa: N818 - it never leaves fit_with_rollback
    """Ends a fit so that another one can begin at a checkpoint."""


class WayBack:
    """The way back of one `fit_with_rollback`.

    Parameters
    ----------
    trainer:
        The trainer.
    config:
        The knobs.
    saves:
        What the trainer has saved.
    on_rollback:
        What to change after a rollback, instead of what `config` says.

    Attributes
    ----------
    why_not:
        Why this trainer cannot be taken back, "" where it can.
    returning:
        Whether the fit under way was sent to its checkpoint by the guard.
    begun:
        Whether the fit under way has come as far as its first batch: what it raises from then on is not about loading.
    target:
        The checkpoint that the guard last sent it to.
    """

    def __init__(self, trainer: Any, config: GuardConfig, saves: Saves, on_rollback: OnRollback | None = None) -> None:
        self.trainer = trainer
        self.config = config
        self.on_rollback = on_rollback
        self.why_not = internals.why_not_back(trainer)
        self.returning = self.begun = False
        self.target: Checkpoint | None = None
        self._saves = saves

    @property
    def ready(self) -> bool:
        """Whether the guard may take this run back."""
        return self.config.action == "rollback" and not self.why_not

    def make_ready(self, guard: KLGuard | None) -> Checkpoint | None:
        """Prepare files for a rollback that is decided; return the checkpoint, None where it cannot be made.

        Every process must call this, one whose guard is broken too.
        """
        target = agreed_target(guard, self._prepare_files, Path.exists)
        if target is not None:
            self.target = target
            self._saves.forget_after(target.step)
        return target

    def _prepare_files(self, guard: KLGuard) -> Checkpoint | None:
        known = {checkpoint.step: Path(checkpoint.path) for checkpoint in guard.checkpoints if checkpoint.path}
        found = guard.go_back()
        if found is None or guard.folder is None:
            return found
        later = {path: step for step, path in known.items()} | self._saves.written
        later = {path: step for path, step in later.items() if step > found.step and guard.folder not in path.parents}
        guard.checkpoints.move_aside(sorted(later, key=later.__getitem__, reverse=True), guard.attempt)
        places = [path for path in later if path.stem.startswith("last")]  # to be found as the last one again
        original = known.get(found.step)
        if original is not None and guard.folder not in original.parents and original not in later:
            places.append(original)  # where rotation has taken it
        for path in places:
            guard.checkpoints.provide(found, path, guard.attempt)
        return found

    def loads_with(self, guard: KLGuard | None, checkpoint: Checkpoint, weights_only: bool | None) -> bool | None:
        """Return the `weights_only` to load a checkpoint with, on every process alike; None leaves it to the trainer.

        Unpickling runs what is in a file. Without a word of the user's that is done only with what this process wrote.
        """
        if weights_only is not None:
            return weights_only
        found: bool | None = None
        try:
            if ranks.rank() == 0:
                if reads_plainly(to_load(Path(checkpoint.path))):
                    found = True
                elif guard is not None and guard.checkpoints.wrote(checkpoint):
                    found = False
        except Exception:
            logger.exception("kl-guard: a fault of the guard itself in looking at a checkpoint")
        loads: bool | None = ranks.gather(found)[0]
        return loads

    def known(self, guard: KLGuard, step: int) -> Checkpoint | None:
        """Return the checkpoint that training was resumed from, where it is one of this run's, or a pin of one."""
        checkpoint, resumed = guard.checkpoints.get(step), self.trainer.ckpt_path
        if checkpoint is None or resumed is None or guard.folder is None:
            return None
        path = Path(resumed).absolute()
        pin = guard.folder / "pins" / f"step-{step}"
        places = {Path(checkpoint.path).absolute(), pin.absolute()}
        return checkpoint if places & {path, path.parent} or path.stem.startswith("last") else None

    def restore(
        self, guard: KLGuard | None, module: Any, checkpoint: Checkpoint | None, reason: Finding | None
    ) -> None:
        """Change what is to be done otherwise, and compare what was loaded with what was saved.

        Every process must call this, after the trainer has loaded the checkpoint and before the first step.

        Raises
        ------
        RestoreFailed
            On all processes, when a check failed on any; the message names it.
        """
        failed: list[str] = []
        context = None
        try:
            if guard is None or checkpoint is None:
                raise RuntimeError("the guard does not know this checkpoint")
            failed += self._check(module, checkpoint)
            rates = self._rates()
            if not failed:  # what is changed on purpose comes after: a function of the user's may change the module
                context = self._change(guard, module, checkpoint, reason)
                factor = context.changes.learning_rate / context.held.learning_rate
                failed += differences(rates, self._rates(), factor)
        except Exception as error:
            logger.exception("kl-guard: a fault in restoring")
            failed.append(f"a fault in restoring: {error!r}")
        context = settle(guard, checkpoint, context, failed)
        if context.seed is not None:
            set_seed(context.seed)
        forget_what_is_gone(self.trainer)

    def _change(self, guard: KLGuard, module: Any, checkpoint: Checkpoint, reason: Finding | None) -> RollbackContext:
        made = RollbackContext(
            guard.attempt,
            checkpoint,
            reason,
            self.config,
            [Optimizers(self.trainer)],
            [Schedulers(self.trainer)],
            guard.changes_in(checkpoint),
            base_seed=checkpoint.step,
            trainer=self.trainer,
            module=module,
        )
        change(made, self.on_rollback)
        return made

    def _rates(self) -> dict[str, Any]:
        return {
            "learning rate": learning_rate.rates(Optimizers(self.trainer)),
            "base learning rate": learning_rate.base_rates(Schedulers(self.trainer)),
        }

    def _check(self, module: Any, checkpoint: Checkpoint) -> list[str]:
        step = int(self.trainer.global_step)
        if not checkpoint.facts:
            return [] if step == checkpoint.step else [f"global step: {checkpoint.step} was expected, {step} is there"]
        found: Mapping[str, Any] = optimizers.facts(self.trainer, module)
        expected: dict[str, Any] = {**checkpoint.facts, "global step": checkpoint.step}
        weights = expected.pop("weights")
        if len(weights) == ranks.world_size() and found["weights"] not in (weights[0], weights[ranks.rank()]):
            expected["weights"] = weights[ranks.rank()]  # a replica may have had buffers of its own; rank 0 saves
        return list(differences(expected, found, 1.0))
