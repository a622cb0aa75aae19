"""Going back in a trainer: what is kept at each save, what is restored, changed and checked before training goes on."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed

from kl_guard import Checkpoint, Finding, GuardConfig, KLGuard, learning_rate
from kl_guard_torch import ranks
from kl_guard_torch.changes import change
from kl_guard_torch.facts import differences, facts_of, fingerprint
from kl_guard_torch.going_back import agreed_target, settle
from kl_guard_torch.room import why_no_room
from kl_guard_trl import internals, reference
from kl_guard_trl.changes import RollbackContext

logger = logging.getLogger("kl_guard")

OnRollback = Callable[[RollbackContext], Any]


class WayBack:
    """The way back of one trainer.

    Parameters
    ----------
    trainer:
        A trainer of TRL or transformers.
    config:
        The knobs.
    on_rollback:
        What to change after a rollback, instead of what `config` says.

    Attributes
    ----------
    why_not:
        Why this trainer cannot be taken back, "" where it can.
    resume_from:
        The checkpoint that the `train()` under way began with; None for a fresh start.
    target:
        The checkpoint that the guard last sent it to.
    """

    def __init__(self, trainer: Any, config: GuardConfig, on_rollback: OnRollback | None = None) -> None:
        self.trainer = trainer
        self.config = config
        self.on_rollback = on_rollback
        self.why_not = internals.why_not_back(trainer)
        self.resume_from: Path | None = None
        self.target: Checkpoint | None = None
        self._original_beta = internals.beta_of(trainer)
        self._seed: int | None = None
        self._learning_rate = 1.0  # factor in force

    @property
    def ready(self) -> bool:
        """Whether the guard may take this run back."""
        return self.config.action == "rollback" and not self.why_not

    def folder_of(self, step: int) -> Path:
        """Return where the trainer looks for the checkpoint of a step."""
        return Path(self.trainer.args.output_dir) / f"checkpoint-{step}"

    # While training goes well.

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a restored state of this process is compared with."""
        trainer = self.trainer
        facts = facts_of(trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, step)
        if reference.moves(trainer):
            facts["reference"] = fingerprint(trainer.ref_model)
        return facts

    def keep_reference(self, checkpoint: Path) -> None:
        """Put a reference that moves beside the policy it belongs to; only for the process that writes."""
        if reference.moves(self.trainer):
            reference.save(self.trainer, checkpoint)

    def why_no_start(self, model: Any) -> str:
        """Return why the state before the first step cannot be saved, "" where it can."""
        if internals.is_fsdp(self.trainer):
            # torch fills the moments by a step of its own when it gathers them: training would not be the same.
            return "FSDP cannot save an optimizer that has made no step without making one"
        return why_no_room(Path(self.trainer.args.output_dir) / "kl_guard", model)

    def save_start(self) -> Path:
        """Save the state before the first step; return its folder. Every process must call this."""
        return internals.save_start(self.trainer, Path(self.trainer.args.output_dir) / "kl_guard" / "start")

    def forget_start(self) -> None:
        """Remove what is left where the start was saved; the checkpoint itself has become a pin."""
        shutil.rmtree(Path(self.trainer.args.output_dir) / "kl_guard" / "start", ignore_errors=True)

    # Going back.

    def make_ready(self, guard: KLGuard | None) -> Checkpoint | None:
        """Prepare files and trainer for a rollback that is decided; return the checkpoint, None where it cannot be.

        Every process must call this, one whose guard is broken too.
        """
        target = agreed_target(guard, self._prepare_files, Path.is_dir)
        if target is not None:
            self.target = target
            internals.forget_rollouts(self.trainer, target.step)
            internals.unwrap_engine(self.trainer)
        return target

    def _prepare_files(self, guard: KLGuard) -> Checkpoint | None:
        found = guard.go_back(self.folder_of, checkpoints_in(Path(self.trainer.args.output_dir)))
        if found is not None:
            self._put_completions_aside(found.step, guard.attempt)
        return found

    def undo(self) -> None:
        """At a fresh start: put back what an earlier run of this trainer had changed."""
        if self._original_beta is not None:
            internals.set_beta(self.trainer, self._original_beta)
        if self._learning_rate != 1.0:
            learning_rate.scale(self.trainer.optimizer, self.trainer.lr_scheduler, 1 / self._learning_rate)
            self._learning_rate = 1.0

    def restore(self, guard: KLGuard | None, checkpoint: Checkpoint | None, reason: Finding | None) -> None:
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
            self._restore_reference(checkpoint)
            context = self._change(guard, checkpoint, reason)
            failed += self._check(checkpoint, context.changes.learning_rate / context.held.learning_rate)
        except Exception as error:
            logger.exception("kl-guard: a fault in restoring")
            failed.append(f"a fault in restoring: {error!r}")
        context = settle(guard, checkpoint, context, failed)
        self._seed = context.seed
        self._learning_rate = context.changes.learning_rate

    def carry_on(self, guard: KLGuard, checkpoint: Checkpoint | None) -> None:
        """After a restart of the process: put back what no checkpoint holds, beta and a moving reference."""
        if checkpoint is not None:
            self._restore_reference(checkpoint)
        elif guard.attempt > 0 and self.trainer.args.process_index == 0:
            logger.warning(
                "kl-guard: this run was taken back before, and what it resumes from is no checkpoint that the guard "
                "knows: the learning rate is left as it is found there"
            )
        changes = guard.changes
        if changes is not None and self._original_beta and changes.beta != 1.0:
            internals.set_beta(self.trainer, self._original_beta * changes.beta)
            if self.trainer.args.process_index == 0:
                logger.warning("kl-guard: beta is x%g, as attempt %d had it", changes.beta, guard.attempt)

    def apply_noise(self) -> None:
        """In the first step after a rollback: the trainer has restored the random state by now."""
        if self._seed is not None:
            set_seed(self._seed, device_specific=True)
            self._seed = None

    def known(self, guard: KLGuard, step: int) -> Checkpoint | None:
        """Return the checkpoint that training was resumed from, where it is one of this run's, or a pin of one."""
        checkpoint = guard.checkpoints.get(step)
        if checkpoint is None or self.resume_from is None:
            return None
        pin = Path(self.trainer.args.output_dir) / "kl_guard" / "pins" / f"step-{step}"
        places = [Path(checkpoint.path), pin, self.folder_of(step)]
        return checkpoint if self.resume_from.resolve() in [place.resolve() for place in places] else None

    def _restore_reference(self, checkpoint: Checkpoint) -> None:
        if reference.moves(self.trainer):
            folder = self.resume_from or Path(checkpoint.path)
            if not reference.restore(self.trainer, folder) and self.trainer.args.process_index == 0:
                logger.warning("kl-guard: %s holds no reference, though sync_ref_model moves it", folder)

    def _change(self, guard: KLGuard, checkpoint: Checkpoint, reason: Finding | None) -> RollbackContext:
        made = RollbackContext(
            attempt=guard.attempt,
            checkpoint=checkpoint,
            reason=reason,
            config=self.config,
            optimizers=(self.trainer.optimizer,),
            schedulers=(self.trainer.lr_scheduler,),
            held=guard.changes_in(checkpoint),
            base_seed=int(self.trainer.args.seed),
            trainer=self.trainer,
            original_beta=self._original_beta,
        )
        if self._original_beta is not None:
            internals.set_beta(self.trainer, self._original_beta)
        change(made, self.on_rollback)
        return made

    def _check(self, checkpoint: Checkpoint, lr_factor: float) -> list[str]:
        trainer = self.trainer
        step = int(trainer.state.global_step)
        if not checkpoint.facts:
            return [] if step == checkpoint.step else [f"global step: {checkpoint.step} was expected, {step} is there"]
        expected: dict[str, Any] = {**checkpoint.facts, "global step": checkpoint.step}
        weights = expected.pop("weights")
        if len(weights) == ranks.world_size():
            expected["weights"] = weights[ranks.rank()]
        found: Mapping[str, Any] = facts_of(trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, step)
        if "reference" in expected:
            found = {**found, "reference": fingerprint(trainer.ref_model)}
        return list(differences(expected, found, lr_factor))

    def _put_completions_aside(self, step: int, attempt: int) -> None:
        """Keep the completions that were logged after `step`: the same steps will write theirs over them."""
        folder = Path(self.trainer.args.output_dir)
        for file in (folder / "completions").glob("completions_*.parquet"):
            number = re.fullmatch(r"completions_(\d+)", file.stem)
            if number and int(number[1]) > step:
                aside = folder / "kl_guard" / "quarantine" / f"attempt-{attempt}-completions"
                aside.mkdir(parents=True, exist_ok=True)
                file.replace(aside / file.name)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the trainer's checkpoints in a folder, by step."""
    matches = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return {int(match[1]): path for match, path in matches if match and path.is_dir()}
