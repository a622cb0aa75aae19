"""The guard as a callback of the TRL trainers."""

from __future__ import annotations

import logging
import math
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kl_guard import Checkpoint, Decision, Finding, GuardConfig, KLGuard, KLGuardHalted
from kl_guard_trl import ranks
from kl_guard_trl.halted_state import HaltedState
from kl_guard_trl.hosts import kl_kind_of, limits, on_generation_boundary, steps_per_log

logger = logging.getLogger("kl_guard")

T = TypeVar("T")
_KEYS = {
    "kl": "kl_mean",
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}
_IN_CHARGE: weakref.WeakValueDictionary[int, KLGuardCallback] = weakref.WeakValueDictionary()


class KLGuardCallback(TrainerCallback):
    """Watches the KL that a `GRPOTrainer` or `RLOOTrainer` logs, and halts the run when it blows up.

    On a halt training stops at that very step on all ranks, the save and the evaluation due in it are called off (they
    would put a bad checkpoint in the place of a good one), and the state is kept in `<output_dir>/kl_guard/halted/`.
    Whatever goes wrong inside the guard, training goes on.

    Parameters
    ----------
    config:
        The knobs; defaults where None.
    **overrides:
        Single knobs by name, such as `action="warn"`.

    Attributes
    ----------
    halted:
        Whether the guard stopped the last run: look at it before the model is saved or pushed.
    decision:
        The decision that stopped it, with the finding in `.reason` and the way back in `.checkpoint`.
    guard:
        The `KLGuard` of the run, with all findings; None before training.

    Raises
    ------
    TypeError, ValueError
        For a knob that does not exist or a value that is not allowed.
    KLGuardHalted
        Out of `trainer.train()` after a halt, with `on_halt="raise"`.
    """

    def __init__(self, config: GuardConfig | None = None, **overrides: Any) -> None:
        self.config = GuardConfig.build(config, **overrides)
        self.guard: KLGuard | None = None
        self.halted = False
        self.decision = Decision()
        self._state: TrainerState | None = None
        self._idle = False
        self._fresh = False
        self._log_due = False
        self._wants_halt = False
        self._last_logged = 0
        self._decided_at = -1
        self._kept: HaltedState | None = None
        self._faults: set[str] = set()

    # What the trainer calls. The guard's own work runs inside `_guarded`, what all ranks must do alike outside.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin or resume, and say what will limit the guard in this run."""
        if state is self._state and self._fresh:
            self._say_once("twice", "this KLGuardCallback was added twice; once is enough")
            return
        self._state, self._fresh = state, True
        self.halted, self.decision = False, Decision()
        self._wants_halt = self._log_due = False
        self._decided_at = state.global_step
        before, self.guard = self.guard, None
        self._idle = self._stands_aside(args, control)  # before anything that may fail: all ranks must agree on it
        if not self._idle:
            self._guarded(self._start, args, state, before)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note whether this step's log is the trainer's own, which every rank gets."""
        self._fresh = False
        self._expect_log(state, control)
        self._keep_stopping(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """As at the end of a step; after a halt, call off what is due at the end of an epoch."""
        self._guarded(self._finish_keeping, args, state)
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
        self._guarded(self._finish_keeping, args, state)
        if self._idle or logs is None or "loss" not in logs:
            return
        decision = self._guarded(self._observe, args, state, logs) or Decision()
        self._wants_halt = self._wants_halt or bool(decision)
        due, self._log_due = self._log_due, False
        if due:
            self._decided_at = state.global_step
        if self._agreed(due, args.device):
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
            first = not self.halted
            self.halted = True
            if first and self._settle(args, state, model):
                control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note a checkpoint, or that the halted state is on disk, once every rank has written its part."""
        self._log_due = False
        try:
            ranks.barrier()
        except Exception:
            self._fault("waiting for the other ranks")
        self._guarded(self._saved, args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the files; raise after a halt where the user asked for it."""
        self._guarded(self._finish_keeping, args, state)
        self._guarded(self._finish, control)
        if self.halted and not self._idle and self.config.on_halt == "raise":
            reason = self.decision.reason
            what = f"{reason.signature} at step {reason.step}: {reason.message}" if reason else "halted by another rank"
            raise KLGuardHalted(what, self.decision)

    # What it does.

    def _stands_aside(self, args: Any, control: TrainerControl) -> bool:
        """Return whether this callback has nothing to do: another one guards, or there is no KL to watch."""
        other = _IN_CHARGE.get(id(control))
        if other is not None and other is not self and other._state is self._state:
            self._say_once("second", "a second KLGuardCallback was added; the first one guards, this one does nothing")
            return True
        if kl_kind_of(args) is None:
            name = type(args).__name__
            self._say_once("kind", f"{name}: its `kl` is no distance that grows in a blow-up; it is not watched")
            return True
        _IN_CHARGE[id(control)] = self
        return False

    def _start(self, args: Any, state: TrainerState, before: KLGuard | None) -> None:
        if before is not None:
            before.close()  # a run that ended by an exception did not
        if self._kept is not None:
            self._kept.restore()
        self._last_logged = state.global_step
        kind = kl_kind_of(args)
        if kind is not None and self.config.kl_kind == "k3":
            self.config = replace(self.config, kl_kind=kind)
        every = steps_per_log(args, state)
        self.guard = KLGuard(
            self.config,
            output_dir=args.output_dir,
            rank=args.process_index,
            expected_observations=state.max_steps // every if every else None,
        )
        if args.process_index == 0:
            for line in limits(args, state, self.config):
                logger.warning("kl-guard: %s", line)
        if state.global_step > 0:
            self.guard.resumed(state.global_step, history=_training_logs(state.log_history))
            self._find_checkpoints(Path(args.output_dir), state.global_step)

    def _find_checkpoints(self, output_dir: Path, step: int) -> None:
        """Tell the guard of checkpoints that an earlier process saved and its journal does not know."""
        assert self.guard is not None  # noqa: S101 - called by _start
        known = {c.step for c in self.guard.checkpoints}
        for folder in sorted(output_dir.glob("checkpoint-*")):
            match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
            if match and int(match[1]) <= step and int(match[1]) not in known and folder.is_dir():
                self.guard.checkpoint_saved(int(match[1]), folder)

    def _observe(self, args: Any, state: TrainerState, logs: Mapping[str, Any]) -> Decision:
        if self.guard is None:
            return Decision()
        values = {name: logs[key] for key, name in _KEYS.items() if key in logs}
        if "kl" in logs and logs["kl"] is None:
            values["kl_mean"] = math.nan  # TRL leaves NaN out before it averages: None is a window of nothing but NaN
        elif "kl" not in logs:
            self._name_others(logs)
        window = max(1, state.global_step - self._last_logged)
        self._last_logged = state.global_step
        decision = self.guard.observe(step=state.global_step, beta=getattr(args, "beta", None), window=window, **values)
        if decision:
            self.decision = decision
        return decision

    def _name_others(self, logs: Mapping[str, Any]) -> None:
        others = [key for key in logs if "kl" in re.split(r"[^a-z]+", key.lower())]
        if others:
            self._say_once("others", f"the log has no `kl`, but {', '.join(map(repr, others))}, which is not watched")

    def _agreed(self, due: bool, device: torch.device) -> bool:
        """Return whether any rank wants to halt. At a log that every rank gets they ask each other; else it waits."""
        try:
            if ranks.world_size() == 1:
                return self._wants_halt
            return ranks.any_rank(self._wants_halt, device) if due else False
        except Exception:
            self._fault("agreeing with the other ranks")
            return False

    def _settle(self, args: Any, state: TrainerState, model: Any) -> bool:
        """On all ranks, after all have agreed to halt: share the reason; return whether the state is to be saved."""
        kept, why_not = None, "save_halted is off"
        if self.config.save_halted:
            kept, why_not = self._guarded(_place_for, args, state, model) or (None, "a fault of the guard")
        reason = self.decision.reason
        try:
            told = ranks.gather({"reason": reason.to_dict() if reason else None, "why_not": why_not})
            self._guarded(self._adopt, [t["reason"] for t in told if t["reason"] is not None])
            back = self.decision.checkpoint
            backs = ranks.gather(asdict(back) if back else None)
        except Exception:
            self._fault("sharing the reason for the halt")
            return False
        self._guarded(self._say_way_back, [b for b in backs if b is not None])
        obstacles = [t["why_not"] for t in told if t["why_not"]]
        if obstacles or kept is None:
            if self.config.save_halted and args.process_index == 0:
                logger.warning("kl-guard: the halted state is not kept: %s", "; ".join(obstacles))
            return False
        self._kept = kept
        kept.redirect()
        return True

    def _adopt(self, reasons: list[Mapping[str, Any]]) -> None:
        """Take over the reason of the first rank that has one, where this rank has none."""
        if self.guard is not None and self.decision.reason is None and reasons:
            reason = Finding.from_dict(reasons[0])
            self.decision = Decision("halt", (), None, reason)
            self.guard.adopt(reason)
            self.decision = self.guard.decision or self.decision

    def _say_way_back(self, backs: list[Mapping[str, Any]]) -> None:
        """Name, on all ranks, the checkpoint to go back to: the first rank that knows one has the pins."""
        if not backs:
            return
        self.decision = replace(self.decision, checkpoint=Checkpoint(**backs[0]))
        if self.guard is not None and self.guard.rank == 0:
            logger.warning(
                "kl-guard: to go back, change what caused it (the same settings fail the same way again), then: "
                "trainer.train(resume_from_checkpoint=%r) (True would take the newest checkpoint, maybe from the "
                "trouble itself)",
                backs[0]["path"],
            )

    def _saved(self, args: Any, state: TrainerState) -> None:
        if self._kept is not None and self._kept.pending:
            self._kept.saved = True  # callbacks after this one still look for it where the trainer put it
        elif self.guard is not None and not self._idle:
            step = state.global_step
            folder = Path(args.output_dir) / f"checkpoint-{step}"
            self.guard.checkpoint_saved(step, folder, aligned=on_generation_boundary(args, step))

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
        if self.halted and not self._idle:
            control.should_training_stop = True
            control.should_save = self._kept is not None and self._kept.pending and not self._kept.saved
            control.should_evaluate = False

    def _finish(self, control: TrainerControl) -> None:
        if self._kept is not None:
            self._kept.restore()
        if self.guard is not None:
            self.guard.close()
        if _IN_CHARGE.get(id(control)) is self:
            del _IN_CHARGE[id(control)]

    def _guarded(self, work: Callable[..., T], *args: Any) -> T | None:
        """Do something of the guard's; whatever it raises is logged once, and training goes on."""
        try:
            return work(*args)
        except Exception:
            self._fault(getattr(work, "__name__", repr(work)).strip("_"))
            return None

    def _fault(self, doing: str) -> None:
        if doing not in self._faults:
            self._faults.add(doing)
            logger.exception("kl-guard: a fault of the guard itself (%s); training goes on, the guard is blind", doing)

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._faults:
            self._faults.add(key)
            logger.warning("kl-guard: %s", text)


def _place_for(args: Any, state: TrainerState, model: Any) -> tuple[HaltedState, str]:
    """Return where the halted state goes, and why it cannot ("" where it can)."""
    kept = HaltedState(args, state)
    return kept, kept.why_not(model)


def _training_logs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the training logs of a trainer's history, each with the steps it averages."""
    training = [row for row in rows if "loss" in row and "step" in row]
    last = 0
    out: list[dict[str, Any]] = []
    for row in training:
        out.append({**row, "window": max(1, row["step"] - last)})
        last = row["step"]
    return out
