"""The guard as a callback of the TRL trainers."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kl_guard import Decision, GuardConfig, KLGuard, KLGuardHalted
from kl_guard.alerts import Alerts, OnIncident
from kl_guard.token_stats import TokenStats
from kl_guard_torch import ranks
from kl_guard_torch.agreement import settle
from kl_guard_torch.faults import Faults
from kl_guard_trl import hosts, internals
from kl_guard_trl.attach import Reentry
from kl_guard_trl.capture import Capture
from kl_guard_trl.halted_state import HaltedState
from kl_guard_trl.measurement import facts_of, reference_checksum
from kl_guard_trl.probe import ReferenceProbe, put_aside_initial
from kl_guard_trl.way_back import OnRollback, WayBack, checkpoints_in

logger = logging.getLogger("kl_guard")

T = TypeVar("T")
_IN_CHARGE: weakref.WeakValueDictionary[int, KLGuardCallback] = weakref.WeakValueDictionary()


class KLGuardCallback(TrainerCallback):
    """Watches the KL that a `GRPOTrainer` or `RLOOTrainer` logs, and halts the run or takes it back when it blows up.

    On a halt training stops at that very step on all ranks, the save and the evaluation due in it are called off (they
    would put a bad checkpoint in the place of a good one), and the state is kept in `<output_dir>/kl_guard/halted/`.
    With `action="rollback"` and `attach`, training goes on from the checkpoint before the trouble instead, with what
    `lr_factor`, `beta_factor` and `new_noise` say. Whatever goes wrong inside the guard, training goes on.

    Parameters
    ----------
    config:
        The knobs; defaults where None.
    on_rollback:
        Called with a `RollbackContext` after each rollback, to change what is to be done otherwise in the place of
        `lr_factor`, `beta_factor` and `new_noise`.
    reference:
        A model that `probe="auto"` measures KL against where the trainer has no reference (beta 0).
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
        For a knob that does not exist or a value that is not allowed.
    ModuleNotFoundError
        For alerts by URL without the package apprise.
    KLGuardHalted
        Out of `trainer.train()` after a halt, with `on_halt="raise"`.
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        on_rollback: OnRollback | None = None,
        reference: torch.nn.Module | None = None,
        alerts: Iterable[str] | str | None = None,
        on_incident: OnIncident | None = None,
        **overrides: Any,
    ) -> None:
        self.config = GuardConfig.build(config, **overrides)
        self._alerts = Alerts(alerts, on_incident)
        if on_rollback is not None and not callable(on_rollback):
            raise TypeError(f"on_rollback must be a function of one argument, or None, got {on_rollback!r}")
        self.guard: KLGuard | None = None
        self.halted = False
        self.decision = Decision()
        self.rollbacks: list[Decision] = []
        if reference is not None and not isinstance(reference, torch.nn.Module):
            raise TypeError(f"reference must be a torch module, or None, got {type(reference).__name__}")
        self._on_rollback = on_rollback
        self._reference = reference
        self._capture: Capture | None = None
        self._by_step = False
        self._observed_at = -1
        self._reentry: Reentry | None = None
        self._state: TrainerState | None = None
        self._idle = False
        self._fresh = False
        self._log_due = False
        self._wants_halt = False
        self._last_logged = 0
        self._decided_at = -1
        self._kept: HaltedState | None = None
        self._faults = Faults()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as for a process that is spawned, has the same configuration and knows of no trainer and no run."""
        make = functools.partial(type(self), on_rollback=self._on_rollback, reference=self._reference)
        return make, (self.config,)

    def attach(self, trainer: Any) -> KLGuardCallback:
        """Let the guard see the tokens of every optimizer step, and take this trainer's run back by itself.

        Adds the callback to the trainer where it is not in it. From now on every step is observed, whatever
        `logging_steps` is, with the log-probs that the trainer computes anyway; and with `action="rollback"`
        `trainer.train()` returns when the run is really over. Where this trainer cannot be watched so, or cannot be
        taken back, the start of training says why.

        Raises
        ------
        TypeError
            For something that is no trainer.
        ValueError
            If it is attached to another trainer already.
        """
        if not hasattr(trainer, "callback_handler") or not callable(getattr(trainer, "train", None)):
            raise TypeError(f"attach needs a trainer of TRL or transformers, got {type(trainer).__name__}")
        if self._reentry is not None:
            if self._reentry.way.trainer is not trainer:
                raise ValueError("this KLGuardCallback is attached to another trainer; make one for each")
            return self
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._reentry = Reentry(self, WayBack(trainer, self.config, self._on_rollback), self._faults)
        probe = None
        if self.config.probe == "auto":
            probe = ReferenceProbe(trainer, self._reference, self.config.probe_every)
        self._capture = Capture(trainer, self.config, self._faults, probe)
        return self

    # What the trainer calls. The guard's own work runs inside `_guarded`, what all ranks must do alike outside.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin or resume, and say what will limit the guard in this run."""
        if state is self._state and self._fresh:
            self._faults.say_once("twice", "this KLGuardCallback was added twice; once is enough")
            return
        self._state, self._fresh = state, True
        reentry = self._reentry
        self.halted, self.decision = False, Decision()
        self._wants_halt = self._log_due = False
        self._decided_at = self._last_logged = state.global_step
        before = self.guard
        self._idle = self._stands_aside(args, control)  # before anything that may fail: all ranks must agree on it
        if self._capture is not None:
            self._capture.watches = not self._idle
        if not self._idle:
            if reentry is None or not reentry.returning:
                self.guard, self.rollbacks = None, []
                self._faults.guarded(self._start, args, state, before)
            if reentry is not None:
                reentry.restore(state)
            self._begin_capture(args, state)
            self._faults.guarded(self._keep_start, args, state, kwargs.get("model"))
        if reentry is not None:
            reentry.begun()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """In the first step after a rollback: other noise, once the trainer has restored the random state."""
        if self._way is not None:
            self._faults.guarded(self._way.apply_noise)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Observe the step where its tokens are seen, and note whether its log is one that every rank gets."""
        self._fresh = False
        self._expect_log(state, control)
        if self._by_step and not self._idle and self._capture is not None:
            decision = self._observe_step(self._capture, args, state)
            self._wants_halt = self._wants_halt or bool(decision)
            self._decide(True, args, state, control, kwargs.get("model"))
            if self._stopped and args.logging_strategy != "no":
                control.should_log = True  # due or not: it is this step that one will look for
        self._keep_stopping(control)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the learning rate that this step was made with; the scheduler is about to change it."""
        if self._by_step and self._capture is not None:
            self._faults.guarded(self._capture.note_learning_rate, kwargs.get("optimizer"))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """As at the end of a step; after a halt, call off what is due at the end of an epoch."""
        self._faults.guarded(self._finish_keeping, args, state)
        self._expect_log(state, control)
        self._keep_stopping(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Observe a training log and decide, together with the other ranks, whether to go on."""
        self._faults.guarded(self._finish_keeping, args, state)
        if self._idle or logs is None or "loss" not in logs:
            return
        decision = self._faults.guarded(self._observe, args, state, logs) or Decision()
        self._wants_halt = self._wants_halt or bool(decision)
        due, self._log_due = self._log_due, False
        if due:
            self._decided_at = state.global_step
        self._decide(due, args, state, control, model)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note a checkpoint, or that the halted state is on disk, once every rank has written its part."""
        self._log_due = False
        try:
            ranks.barrier()
        except Exception:
            self._faults.fault("waiting for the other ranks")
        if self._kept is not None and self._kept.pending:
            self._kept.saved = True  # callbacks after this one still look for it where the trainer put it
        elif not self._idle:
            step = state.global_step
            folder = Path(str(args.output_dir)) / f"checkpoint-{step}"
            if self._way is not None and args.process_index == 0:
                self._faults.guarded(self._way.keep_reference, folder)
            aligned = hosts.on_generation_boundary(args, step)
            self._faults.guarded(self._note_checkpoint, args, step, folder, aligned)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the files; raise after a halt where the user asked for it."""
        self._faults.guarded(self._finish_keeping, args, state)
        if self._goes_back:
            return  # it is not over
        self._faults.guarded(self.finish, control)
        if self.halted and not self._idle and self.config.on_halt == "raise":
            reason = self.decision.reason
            what = f"{reason.signature} at step {reason.step}: {reason.message}" if reason else "halted by another rank"
            raise KLGuardHalted(what, self.decision)

    # What it does.

    def _stands_aside(self, args: Any, control: TrainerControl) -> bool:
        """Return whether this callback has nothing to do: another one guards, or there is no KL to watch."""
        other = _IN_CHARGE.get(id(control))
        if other is not None and other is not self and other._state is self._state:
            self._faults.say_once(
                "second", "a second KLGuardCallback was added; the first one guards, this one does nothing"
            )
            return True
        if hosts.kl_kind_of(args) is None:
            name = type(args).__name__
            self._faults.say_once("kind", f"{name}: its `kl` is no distance that grows in a blow-up; it is not watched")
            return True
        _IN_CHARGE[id(control)] = self
        return False

    def _start(self, args: Any, state: TrainerState, before: KLGuard | None) -> None:
        if before is not None:
            before.close()  # a run that ended by an exception did not
        if self._kept is not None:
            self._kept.restore()
        kind = hosts.kl_kind_of(args)
        if kind is not None and self.config.kl_kind == "k3":
            self.config = replace(self.config, kl_kind=kind)
        by_step = self._capture is not None and not self._capture.why_no_steps
        every = hosts.steps_per_kl(args, state, self.config, by_step=by_step)
        self.guard = self.new_guard(args, state.max_steps // every if every else None)
        if args.process_index == 0:
            why_not_back = None if self._way is None else self._way.why_not
            for line in hosts.limits(args, state, self.config, why_not_back, by_step=by_step):
                logger.warning("kl-guard: %s", line)
        if state.global_step > 0 or (self._way is not None and self._way.resume_from is not None):
            ours = {
                step: folder
                for step, folder in checkpoints_in(Path(args.output_dir)).items()
                if hosts.of_one_run(folder, state.log_history)
            }
            self.guard.resumed(state.global_step, hosts.training_logs(state.log_history), present=ours)

    def new_guard(self, args: Any, expected: int | None = None) -> KLGuard:
        """Return a guard that halts where it cannot go back, so that it does not say it would."""
        config = self.config
        if config.action == "rollback" and not (self._way is not None and self._way.ready):
            config = replace(config, action="halt")
        return KLGuard(
            config,
            output_dir=args.output_dir,
            rank=args.process_index,
            expected_observations=expected,
            token_text=self._token_text,
            alerts=self._alerts,
        )

    def _token_text(self, token_id: int) -> str:
        assert self._capture is not None  # noqa: S101 - only asked where tokens are seen
        return internals.token_text(self._capture.trainer, token_id)

    def _keep_start(self, args: Any, state: TrainerState, model: Any) -> None:
        """Pin the state before the first step, where the guard may have to go back that far. On all ranks."""
        way = self._way
        wanted = self.config.pin_start and self.config.pin_checkpoints
        if way is None or not way.ready or not wanted or way.resume_from is not None or state.global_step > 0:
            return
        obstacles = [text for text in self._faults.shared(self._faults.guarded(way.why_no_start, model)) if text != ""]
        if obstacles:
            if args.process_index == 0:
                logger.warning(
                    "kl-guard: the state at the start is not kept, so the first checkpoint will be the first way back: "
                    "%s",
                    obstacles[0] or "a fault of the guard",
                )
            return
        if args.process_index == 0:
            self._faults.guarded(way.forget_start)  # what a killed process left half-done
        self._faults.shared(None)  # nobody saves before that is done
        folder = self._faults.guarded(way.save_start)
        if all(self._faults.shared(folder is not None)) and folder is not None:  # every rank has written its part
            if args.process_index == 0:
                self._faults.guarded(way.keep_reference, folder)
            self._note_checkpoint(args, 0, folder, aligned=True, take=True)
        if args.process_index == 0:
            self._faults.guarded(way.forget_start)

    def _note_checkpoint(self, args: Any, step: int, folder: Path, aligned: bool, take: bool = False) -> None:
        """Tell the guard of a checkpoint, with what a restored state is to be compared with. On all ranks."""
        facts: dict[str, Any] = {}
        if self._way is not None and self._way.ready:
            everywhere = [one for one in self._faults.shared(self._faults.guarded(self._way.facts, step)) if one]
            if len(everywhere) == ranks.world_size():
                facts = {**everywhere[0], "weights": [one["weights"] for one in everywhere]}
        if self.guard is not None:
            note = functools.partial(self.guard.checkpoint_saved, aligned=aligned, facts=facts, take=take)
            self._faults.guarded(note, step, folder)

    def _observe(self, args: Any, state: TrainerState, logs: Mapping[str, Any]) -> Decision:
        if self.guard is None:
            return Decision()
        if "kl" not in logs:
            others = hosts.other_kls(logs)
            if others:
                names = ", ".join(map(repr, others))
                self._faults.say_once("others", f"the log has no `kl`, but {names}, which is not watched")
        window = max(1, state.global_step - self._last_logged)
        self._last_logged = state.global_step
        if self._observed_at == state.global_step:  # the step's own values are known: add what it has logged besides
            values = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs}
            decision = self.guard.observe(step=state.global_step, **(values if window == 1 else _averaged(values)))
            if decision:
                self.decision = decision
            return decision
        beta = internals.beta_of(self._way.trainer) if self._way is not None else getattr(args, "beta", None)
        decision = self.guard.observe(step=state.global_step, beta=beta, window=window, **hosts.values_of(logs))
        if decision:
            self.decision = decision
        return decision

    def _begin_capture(self, args: Any, state: TrainerState) -> None:
        """Find out what can be seen of this run's steps; all ranks come to the same. On all ranks."""
        capture = self._capture
        if capture is None:
            return
        capture.forget()
        fresh = state.global_step == 0 and not (self._way is not None and self._way.resume_from is not None)
        folder = Path(str(args.output_dir)) / "kl_guard" / "reference"
        if fresh and args.process_index == 0:
            self._faults.guarded(put_aside_initial, folder)
        if capture.probe is not None:
            prepare = functools.partial(capture.probe.prepare, folder, fresh=fresh, writes=args.process_index == 0)
            self._faults.guarded(prepare)
            reasons = [text for text in self._faults.shared(capture.probe.why_not) if text]
            capture.probe.why_not = reasons[0] if reasons else ""
            if reasons and args.process_index == 0:
                self._faults.say_once("probe", f"no probe of the reference: {reasons[0]}")
        self._by_step = all(self._faults.shared(not capture.why_no_steps and self.guard is not None))
        if not self._by_step:
            self._faults.say_once("steps", f"only what is logged is observed: {capture.why_no_steps or 'see above'}")
        elif capture.why_no_tokens:
            self._faults.say_once("no tokens", f"tokens are not seen, only scalars: {capture.why_no_tokens}")
        facts = self._faults.guarded(functools.partial(facts_of, capture.trainer, fresh=fresh)) or {}
        if self.guard is not None:
            self.guard.note(facts)
        if args.process_index == 0:
            for name, text in facts.items():
                self._faults.say_once(name, f"{_FACTS.get(name, name)}: {text}")

    def _observe_step(self, capture: Capture, args: Any, state: TrainerState) -> Decision:
        """Observe what passed in this step. On all ranks, whatever fails."""
        stats, metrics = capture.collect()
        return self._faults.guarded(self._observe_captured, capture, args, state, stats, metrics) or Decision()

    def _observe_captured(
        self, capture: Capture, args: Any, state: TrainerState, stats: Any, metrics: dict[str, float]
    ) -> Decision:
        guard, step = self.guard, state.global_step
        if guard is None:
            return Decision()
        probing = capture.probe is not None and not capture.probe.why_not
        if stats is None and "kl" not in metrics and not probing:
            return Decision()  # nothing passed here: what is logged is all there is
        gap = metrics.pop(internals.SAMPLER_GAP, None)
        if gap is not None:
            guard.note({"sampler_gap": float(f"{gap:.1g}")})  # rounded, so that it is seldom news
        checksum = None
        if (step - 1) % self.config.probe_every == 0:
            checksum = self._faults.guarded(reference_checksum, capture.trainer)
        decision = guard.observe(
            step=step,
            beta=internals.beta_of(capture.trainer),
            reference_checksum=checksum,
            tokens=stats,
            **hosts.values_of(metrics),
        )
        self._observed_at = step
        self._show(capture.trainer, guard, stats)
        if decision:
            self.decision = decision
        return decision

    def _show(self, trainer: Any, guard: KLGuard, stats: TokenStats | None) -> None:
        """Put figures into the logs that every tracker sees: the level of each step, and what was measured in it."""
        last = guard.history[-1]
        largest = {"level": float(guard.level), "spikes": float(guard.spikes), "kl_max": last.kl_max}
        means: dict[str, float | None] = {"kl_mean": last.kl_mean}
        if stats is not None:
            largest["log_ratio_max"] = stats.log_ratio_extreme
            means |= {"kl_token_mean": stats.kl_token_mean, "top_share": stats.top_share}
            means["kl_without_special"] = stats.kl_without_special
        for figures in (largest, means):
            for name, value in figures.items():
                if value is not None and not math.isnan(value):
                    internals.add_metric(trainer, f"kl_guard/{name}", value, largest=figures is largest)

    def _decide(
        self, due: bool, args: Any, state: TrainerState, control: TrainerControl, model: torch.nn.Module | None
    ) -> None:
        """Stop, together with the other ranks, where any of them wants to."""
        if self._agreed(due, args.device):
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
            if not self._stopped and self._settle(args, state, model):
                control.should_save = True

    def _agreed(self, due: bool, device: torch.device) -> bool:
        """Return whether any rank wants to halt. At a log that every rank gets they ask each other; else it waits."""
        try:
            if ranks.world_size() == 1:
                return self._wants_halt
            return ranks.any_rank(self._wants_halt, device) if due else False
        except Exception:
            self._faults.fault("agreeing with the other ranks")
            return False

    def _settle(self, args: Any, state: TrainerState, model: Any) -> bool:
        """On all ranks, after all have agreed to stop: share the reason, and halt or go back.

        Returns whether the state is to be saved.
        """
        self.halted = True
        self.decision, leads_back = settle(self.guard, self.decision, self._faults)
        if leads_back and self._reentry is not None and self._reentry.way.ready:
            self.halted, self._reentry.goes_back = False, True
            state.best_model_checkpoint = None  # the trainer would load it, and delete the others, before it goes on
            return False
        self._faults.guarded(self._say_way_back)
        return self._faults.guarded(self._keep_halted, args, state, model) or False

    def _keep_halted(self, args: Any, state: TrainerState, model: Any) -> bool:
        """Return whether the halted state can be saved, and send it to its place if so. On all ranks."""
        if not self.config.save_halted:
            return False
        kept, why_not = self._faults.guarded(_place_for, args, state, model) or (None, "a fault of the guard")
        try:
            obstacles = [text for text in ranks.gather(why_not) if text]
        except Exception:
            self._faults.fault("asking for room for the halted state")
            return False
        if obstacles or kept is None:
            if args.process_index == 0:
                logger.warning("kl-guard: the halted state is not kept: %s", "; ".join(obstacles))
            return False
        self._kept = kept
        kept.redirect()
        return True

    def _say_way_back(self) -> None:
        """Name the checkpoint to go back to, in the call that does it."""
        back = self.decision.checkpoint
        if back is not None and self.guard is not None and self.guard.rank == 0:
            logger.warning(
                "kl-guard: to go back, change what caused it, then: "
                "trainer.train(resume_from_checkpoint=%r) (True would take the newest checkpoint, maybe from the "
                "trouble itself)",
                back.path,
            )

    @property
    def _way(self) -> WayBack | None:
        return self._reentry.way if self._reentry is not None else None

    @property
    def _goes_back(self) -> bool:
        return self._reentry is not None and self._reentry.goes_back

    @property
    def _stopped(self) -> bool:
        return self.halted or self._goes_back

    def _finish_keeping(self, args: Any, state: TrainerState) -> None:
        """Put the halted state in its place and the arguments back, once every callback has seen the save."""
        if self._kept is not None and self._kept.pending and self._kept.saved:
            self._kept.finish(state.global_step, renames=args.process_index == 0)
            if args.process_index == 0:
                logger.warning("kl-guard: the halted state is in %s", self._kept.path)

    def _expect_log(self, state: TrainerState, control: TrainerControl) -> None:
        """Note whether the trainer itself is about to log this step, on every rank; it logs no step twice."""
        self._log_due = control.should_log and state.global_step > self._decided_at

    def _keep_stopping(self, control: TrainerControl) -> None:
        if self._stopped and not self._idle:
            control.should_training_stop = True
            control.should_save = self._kept is not None and self._kept.pending and not self._kept.saved
            control.should_evaluate = False

    def finish(self, control: TrainerControl) -> None:
        """Put the training arguments back, close the files and let go of the folder."""
        if self._kept is not None:
            self._kept.restore()
        if self.guard is not None:
            self.guard.close()
        if _IN_CHARGE.get(id(control)) is self:
            del _IN_CHARGE[id(control)]


_FACTS = {  # said at the start, since each spoils the KL that is measured
    "dropout": "dropout is on while log-probs are computed, so KL holds its noise",
    "reference_trainable": "the reference may be trained",
    "reference_differs": "the reference is not the model that the policy starts from",
    "adapter": "the reference is not the model that the policy starts from",
    "unlike": "policy and reference are run differently",
}


def _averaged(values: dict[str, Any]) -> dict[str, Any]:
    """Return what of a log that averages several steps says something about the last of them."""
    return {name: value for name, value in values.items() if name == "learning_rate"}


def _place_for(args: Any, state: TrainerState, model: Any) -> tuple[HaltedState, str]:
    """Return where the halted state goes, and why it cannot ("" where it can)."""
    kept = HaltedState(args, state)
    return kept, kept.why_not(model)
