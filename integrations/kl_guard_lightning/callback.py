"""The guard as a callback of Lightning's trainers."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kl_guard import Checkpoint, Decision, GuardConfig, KLGuard, KLGuardHalted
from kl_guard.alerts import Alerts, OnIncident
from kl_guard.token_keeper import TokenText
from kl_guard.token_stats import TokenStats
from kl_guard_lightning import internals
from kl_guard_lightning.base import Callback
from kl_guard_lightning.keeping import Keeping
from kl_guard_lightning.limits import expected_steps, limits
from kl_guard_lightning.logged import Logged, Usual
from kl_guard_lightning.saves import is_whole, local, to_load
from kl_guard_lightning.stop import Stop
from kl_guard_lightning.tokens import Tokens
from kl_guard_lightning.way_back import GoingBack, OnRollback, WayBack
from kl_guard_torch import ranks
from kl_guard_torch.agreement import settle
from kl_guard_torch.dropout import dropping, some
from kl_guard_torch.facts import RestoreFailed
from kl_guard_torch.faults import Faults
from kl_guard_torch.rng import random_state, set_random_state
from kl_guard_torch.watch import checked_ids

logger = logging.getLogger("kl_guard")

GO_ON, STOP, UNKNOWN = 0, 1, 2  # what a rank has to say after a batch; the largest counts


class KLGuardCallback(Callback):
    """Watches the KL that a training step logs or returns, and halts the run or takes it back when it blows up.

    Works in `Trainer(callbacks=[...])` of `lightning.pytorch` and of `pytorch_lightning`. Each optimizer step is
    observed once. On a halt training stops after that very batch on all ranks, whatever `min_steps` says; no checkpoint
    callback saves any more, since that would put a bad checkpoint in the place of a good one; and the state is kept in
    `<output_dir>/kl_guard/halted/`. With `action="rollback"` and `fit_with_rollback`, training goes on from the
    checkpoint before the trouble instead. Whatever goes wrong inside the guard, training goes on.

    Checkpoints hold the random state of every rank, so that resuming from one is exact where the data loader keeps its
    place. Budget and history are in the journal only: state that came back with a checkpoint would rewind them.

    Parameters
    ----------
    config:
        The knobs; defaults where None.
    kl_mean, kl_max:
        Names under which `training_step` logs KL of policy and reference, mean and maximum over tokens, in nats per
        token unless `kl_kind` says otherwise. Where they are not given, usual names are tried.
    output_dir:
        Where `kl_guard/` is kept; `trainer.default_root_dir` where None. Checkpoints should be somewhere below it.
    on_rollback:
        Called with a `RollbackContext` after each rollback, to change what is to be done otherwise in the place of
        `lr_factor` and `new_noise`. The weight of a KL penalty is the module's own: this is the place to raise it, and
        in a buffer of the module it is saved with the checkpoints to come.
    special_ids:
        Ids of tokens that are no content, such as `tokenizer.all_special_ids`: KL without them is told as well, where
        `training_step` returns `token_ids`.
    token_text:
        Gives the text of a token id, such as a tokenizer's `convert_ids_to_tokens`.
    alerts, on_incident:
        Who hears of each incident: apprise URLs (those in `KL_GUARD_ALERTS` where None), and a function that is called
        with an `Incident`.
    **overrides:
        Single knobs by name, such as `action="warn"`.

    Attributes
    ----------
    halted:
        Whether the guard stopped the last run: look at it before the model is saved or pushed.
    decision:
        The decision that stopped it, with the finding in `.reason` and the way back in `.checkpoint`.
    rollbacks:
        The decisions to go back in the last run, in order.
    guard:
        The `KLGuard` of the run, with all findings; None before training.

    Raises
    ------
    TypeError, ValueError
        For a knob that does not exist or a value that is not allowed. A ValueError out of `fit`, after the first batch
        that logs something, for a name given here that is not among what was logged.
    ModuleNotFoundError
        For alerts by URL without the package apprise.
    KLGuardHalted
        Out of `fit` after a halt, with `on_halt="raise"`.
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        kl_mean: str = Usual("kl_mean"),
        kl_max: str = Usual("kl_max"),
        output_dir: str | os.PathLike[str] | None = None,
        on_rollback: OnRollback | None = None,
        special_ids: Iterable[int] = (),
        token_text: TokenText | None = None,
        alerts: Iterable[str] | str | None = None,
        on_incident: OnIncident | None = None,
        **overrides: Any,
    ) -> None:
        self.config = GuardConfig.build(config, **overrides)
        self._alerts = Alerts(alerts, on_incident)
        if on_rollback is not None and not callable(on_rollback):
            raise TypeError(f"on_rollback must be a function of one argument, or None, got {on_rollback!r}")
        for name, value in (("kl_mean", kl_mean), ("kl_max", kl_max)):
            if not isinstance(value, str) or not value:
                raise TypeError(f"{name} must be the name of a metric, got {value!r}")
        self.guard: KLGuard | None = None
        self.halted = False
        self.decision = Decision()
        self.rollbacks: list[Decision] = []
        self.on_rollback = on_rollback
        self.way: WayBack | None = None
        self._output_dir = None if output_dir is None else Path(output_dir)
        self._faults = Faults()
        self.keeping = Keeping(self.config, self._faults)
        self._stop = Stop()
        self._logged = Logged(kl_mean, kl_max)
        self._tokens = Tokens(self._faults, self.config.outlier_top_k, checked_ids(special_ids))
        self._token_text = token_text
        self._trainer: Any = None
        self._goes_back = False
        self._step = 0  # the last optimizer step that was observed
        self._learning_rate: float | None = None
        self._loss: Any = None
        self._looked = False  # at which modules drop out
        self._loaded: Mapping[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as for a process that is spawned, has the same configuration and knows of no trainer and no run."""
        given: dict[str, Any] = {**self._logged.asked, "output_dir": self._output_dir, "on_rollback": self.on_rollback}
        given |= {"special_ids": self._tokens.special_ids, "token_text": self._token_text}
        return functools.partial(type(self), **given), (self.config,)

    @property
    def state_key(self) -> str:
        """Under which a checkpoint keeps the state: whatever the configuration is, it is the same."""
        return "KLGuardCallback"

    # What the trainer calls. The guard's own work runs inside `guarded`, what all ranks must do alike outside.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to look at what is saved, before anything is."""
        if stage != "fit":
            return
        self._stop.over()
        self._loaded = None
        self._trainer = trainer
        self.keeping.watch(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the random state of all ranks. Every process must call this, as it does when a trainer saves."""
        return {"format": 1, "random": self._faults.shared(self._faults.guarded(random_state))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until training begins."""
        self._loaded = state_dict

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the random state back before the data loader draws the order of an epoch."""
        self._faults.guarded(self._restore_random_state)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, resume, or go on after a rollback; put the random state back, from which the loader may have drawn.

        Raises
        ------
        RestoreFailed
            On all ranks, out of `fit` and into `fit_with_rollback`.
        """
        way, step = self.way, int(trainer.global_step)
        returning = way is not None and way.returning
        self.halted = self._goes_back = False
        self.decision = Decision()
        self._step = step
        self._looked = False
        self._logged.forget()
        self._tokens.forget()
        self._faults.guarded(self._restore_random_state)
        self._loaded = None
        if not returning:
            before, self.guard, self.rollbacks = self.guard, None, []
            self._faults.guarded(self._start, trainer, step, before)
        self.keeping.begin(self.guard, way, step)
        if way is not None:
            self._restore(way, pl_module, step)
            way.begun = True
        self._faults.guarded(self.keeping.keep_start)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note which metrics are of earlier steps."""
        self._faults.guarded(self._begin_batch, trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the learning rate that this step is made with; a scheduler is about to change it."""
        self._faults.guarded(self._note_learning_rate, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Observe the step that this batch completed, and decide with the other ranks whether to go on.

        Raises
        ------
        ValueError
            For a name given by the user that is not among what was logged.
        GoingBack
            Into `fit_with_rollback`.
        """
        step = int(trainer.global_step)
        stepped = step > self._step
        self.keeping.mid_step = not stepped
        error = self._faults.guarded(self._take_batch, trainer, outputs) or ""
        decision = Decision()
        if stepped and not self.halted:
            self._step = step
            stats = None
            if self._any_tokens(pl_module):
                stats = self._tokens.end_step()
            decision = self._faults.guarded(self._observe, pl_module, step, stats) or decision
        agreed = self._agreed(UNKNOWN if error else STOP if decision else GO_ON, pl_module)
        if agreed == UNKNOWN:
            raise ValueError(error or "a name given to KLGuardCallback is not logged; another rank says which")
        if agreed == STOP and not self.halted:
            self._settle(decision, trainer)
            if self._goes_back:
                self._faults.guarded(internals.send_logs, trainer)  # the trainer does not get to it
                self._leave(trainer)
                raise GoingBack
        if self.halted:
            self._faults.guarded(self._stop.ask, trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take note of checkpoints that were still being written."""
        self._faults.guarded(self.keeping.note_finished)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the files; raise after a halt where the user asked for it.

        Raises
        ------
        KLGuardHalted
            With `on_halt="raise"`.
        """
        self._faults.guarded(self._finish)
        if self.halted and self.config.on_halt == "raise":
            self._stop.mute(trainer)  # what the exception makes the trainer do is not to save this state
            raise self.as_exception()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give everything back."""
        if stage == "fit":
            self._stop.over()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the files where training ended by an exception that is not the guard's own."""
        if not isinstance(exception, (GoingBack, RestoreFailed)):
            self._faults.guarded(self._finish)

    # What it does.

    def new_guard(self, trainer: Any, expected: int | None = None) -> KLGuard:
        """Return a guard that halts where it cannot go back, so that it does not say it would."""
        config = self.config
        if config.action == "rollback" and not (self.way is not None and self.way.ready):
            config = replace(config, action="halt")
        return KLGuard(
            config,
            output_dir=self.output_dir(trainer),
            rank=int(trainer.global_rank),
            expected_observations=expected,
            token_text=self._token_text,
            alerts=self._alerts,
        )

    def output_dir(self, trainer: Any) -> Path | None:
        """Return where `kl_guard/` is kept; None where that is not on this machine."""
        if self._output_dir is not None:
            return self._output_dir
        root = str(trainer.default_root_dir)
        if "://" in root:
            self._faults.say_once("remote", f"{root} is not on this machine: give KLGuardCallback an output_dir")
            return None
        return Path(root)

    def as_exception(self) -> KLGuardHalted:
        """Return what `on_halt="raise"` raises."""
        reason = self.decision.reason
        what = f"{reason.signature} at step {reason.step}: {reason.message}" if reason else "halted by another rank"
        return KLGuardHalted(what, self.decision)

    def over(self, *, failed: bool = False) -> None:
        """Put everything back after a fit that ended by an exception of the guard's own."""
        self.keeping.saves.leave()
        self._stop.over()
        if failed:
            self._faults.guarded(self._finish)

    def _start(self, trainer: Any, step: int, before: KLGuard | None) -> None:
        if before is not None:
            before.close()  # a run that ended by an exception did not
        self.guard = guard = self.new_guard(trainer, expected_steps(trainer))
        if trainer.is_global_zero:
            why_not_back = None if self.way is None else self.way.why_not
            for line in limits(trainer, self.config, guard.folder, why_not_back):
                logger.warning("kl-guard: %s", line)
        if step > 0 or trainer.ckpt_path is not None:
            guard.resumed(step, present=self._resumed_from(trainer, guard, step))

    def _resumed_from(self, trainer: Any, guard: KLGuard, step: int) -> dict[int, Path]:
        """Return the checkpoint that was loaded, where it is one of the run's own, not of the guard's."""
        path = None if trainer.ckpt_path is None else local(trainer.ckpt_path)
        root = self.output_dir(trainer)
        if step == 0 or path is None or root is None or guard.folder is None or not is_whole(path):
            return {}
        path, kept = path.resolve(), guard.folder.resolve()
        return {step: path} if path.is_relative_to(root.resolve()) and not path.is_relative_to(kept) else {}

    def _restore_random_state(self) -> None:
        if self._loaded is None:
            return
        states = self._loaded.get("random") or []
        state = states[ranks.rank()] if len(states) == ranks.world_size() else None
        if state is not None:
            for missing in set_random_state(state):
                self._faults.say_once(missing, f"{missing} could not be put back")
        else:
            self._faults.say_once("random", "the checkpoint has no random state for this number of processes")

    def _restore(self, way: WayBack, pl_module: Any, step: int) -> None:
        """Where an attempt begins, change and check. On all ranks."""
        checkpoint, guard = way.target if way.returning else None, self.guard
        if checkpoint is None and guard is not None:
            checkpoint = self._faults.guarded(way.known, guard, step)
        begins = way.returning or bool(guard is not None and self._faults.guarded(_begins, guard, checkpoint))
        if any(self._faults.shared(begins and way.ready)):
            try:
                way.restore(guard, pl_module, checkpoint, self.rollbacks[-1].reason if self.rollbacks else None)
            except RestoreFailed:
                self._leave(self._trainer)
                raise

    def _leave(self, trainer: Any) -> None:
        """Let what an exception makes the trainer do leave no trace: nobody saves, and no logger ends its run."""
        self._stop.mute(trainer)
        trainer.loggers = []

    def _begin_batch(self, trainer: Any) -> None:
        self.keeping.note_finished()
        self._logged.begin_batch(trainer.callback_metrics)

    def _note_learning_rate(self, optimizer: Any) -> None:
        self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def _take_batch(self, trainer: Any, outputs: Any) -> str:
        """Take in what the batch gave; return what is wrong with the names that the user chose."""
        fresh = self._logged.take_batch(trainer.callback_metrics)
        self._faults.guarded(self._tokens.take_batch, outputs)
        error, warning = self._logged.missing(fresh, tokens=self._tokens.seen)
        if warning and trainer.is_global_zero:
            self._faults.say_once("names", warning)
        self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        return error

    def _any_tokens(self, pl_module: Any) -> bool:
        try:
            return ranks.any_rank(self._tokens.seen, pl_module.device)
        except Exception:
            self._faults.fault("asking the other ranks for tokens")
            return False

    def _observe(self, pl_module: Any, step: int, stats: TokenStats | None) -> Decision:
        guard, values = self.guard, self._logged.end_step()
        if guard is None:
            return Decision()
        if "loss" not in values and isinstance(self._loss, torch.Tensor) and self._loss.numel() == 1:
            values["loss"] = float(self._loss)
        if "learning_rate" not in values and self._learning_rate is not None:
            values["learning_rate"] = self._learning_rate
        if not self._looked:
            self._looked = True
            self._faults.guarded(self._note_dropout, guard, pl_module)
        decision = guard.observe(step=step, tokens=stats, **values)
        self._faults.guarded(self._show, pl_module, guard, stats)
        return decision

    def _note_dropout(self, guard: KLGuard, pl_module: Any) -> None:
        found = list(dropping(pl_module, in_training=True))
        if found:
            guard.note({"training_dropout": some(found)})

    def _show(self, pl_module: Any, guard: KLGuard, stats: TokenStats | None) -> None:
        """Put figures into the logs that every logger sees."""
        figures: dict[str, float | None] = {"level": float(guard.level), "spikes": float(guard.spikes)}
        if stats is not None:
            last = guard.history[-1]
            figures |= {"kl_mean": last.kl_mean, "kl_max": last.kl_max, "kl_token_mean": stats.kl_token_mean}
            figures |= {"log_ratio_max": stats.log_ratio_extreme, "top_share": stats.top_share}
            figures["kl_without_special"] = stats.kl_without_special
        for name, value in figures.items():
            if value is not None:
                pl_module.log(f"kl_guard/{name}", value, on_step=True, on_epoch=False)

    def _agreed(self, word: int, pl_module: Any) -> int:
        """Return the strongest word of all ranks."""
        try:
            return ranks.largest(word, pl_module.device)
        except Exception:
            self._faults.fault("agreeing with the other ranks")
            return GO_ON

    def _settle(self, decision: Decision, trainer: Any) -> None:
        """On all ranks, after all have agreed to stop: share the reason, and halt or go back."""
        self.decision, back = settle(self.guard, decision, self._faults)
        if back and self.way is not None and self.way.ready:
            self._goes_back = True
            return
        self.halted = True
        self._stop.mute(trainer)
        self._faults.guarded(self._say_way_back)
        self._faults.guarded(self.keeping.keep_halted, self._faults.guarded(self.output_dir, trainer))

    def _say_way_back(self) -> None:
        """Name the checkpoint to go back to, in the call that does it."""
        back = self.decision.checkpoint
        if back is not None and self.guard is not None and self.guard.rank == 0:
            logger.warning(
                "kl-guard: to go back, change what caused it, then: "
                "trainer.fit(module, ckpt_path=%r) ('last' would take the newest checkpoint, maybe from the trouble "
                "itself)",
                os.fspath(to_load(Path(back.path))),
            )

    def _finish(self) -> None:
        self.keeping.finish()
        if self.guard is not None:
            self.guard.close()


def _begins(guard: KLGuard, checkpoint: Checkpoint | None) -> bool:
    """Whether what the present attempt does otherwise is still to be done after loading a checkpoint."""
    return (
        checkpoint is not None and guard.attempt > 0 and (guard.changes is None or checkpoint.attempt < guard.attempt)
    )
