"""The guard for a loop of one's own: it watches, keeps the way back, and goes it."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from kl_guard import Decision, GuardConfig, KLGuard, KLGuardHalted, learning_rate
from kl_guard.alerts import OnIncident
from kl_guard.observation import as_step
from kl_guard.paths import unused
from kl_guard.token_keeper import TokenText
from kl_guard_torch import ranks
from kl_guard_torch.agreement import settle
from kl_guard_torch.changes import RollbackContext
from kl_guard_torch.dropout import dropping, some
from kl_guard_torch.facts import RestoreFailed
from kl_guard_torch.faults import Faults
from kl_guard_torch.room import why_no_room
from kl_guard_torch.saves import Saves
from kl_guard_torch.state import TrainingState
from kl_guard_torch.watch import NAMES, TokenWatch, checked_ids
from kl_guard_torch.way_back import WayBack

logger = logging.getLogger("kl_guard")

P = ParamSpec("P")
R = TypeVar("R")


class TorchGuard:
    """Watches the KL of any torch training loop, saves complete checkpoints, and takes the run back in place.

    Everything is called by every process of a distributed run, at the same places.

    Parameters
    ----------
    config:
        The knobs; defaults where None.
    model, optimizer, scheduler:
        What is trained, or several of each by name (`{"actor": ..., "critic": ...}`, an optimizer and a scheduler under
        the name of its model). Without a model the guard watches and halts.
    scaler:
        A gradient scaler.
    output_dir:
        Where checkpoints (`checkpoint-N`) and the guard's own files (`kl_guard/`) are.
    extras:
        Whatever else has a state that training depends on, by name: a data loader or sampler with `state_dict` and
        `load_state_dict`, a moving average, a `torch.Generator` that orders the data.
    generators:
        The generators that sampling draws from, by name; torch's own streams always count.
    keep:
        How many checkpoints are kept, None for all. What the guard has pinned stays in any case.
    on_rollback:
        Called with a `RollbackContext` after each rollback, to change what is to be done otherwise in the place of
        `lr_factor`, `beta_factor` and `new_noise`.
    expected_steps:
        How many steps the whole run will make, where known: short runs get a shorter warm-up.
    token_text:
        Gives the text of a token id, such as a tokenizer's `convert_ids_to_tokens`.
    special_ids:
        Ids of tokens that are no content, such as `tokenizer.all_special_ids`: of tokens given with their ids, KL
        without these is told as well.
    alerts, on_incident:
        Who hears of each incident: apprise URLs (those in `KL_GUARD_ALERTS` where None), and a function that is called
        with an `Incident`.
    **overrides:
        Single knobs by name, such as `action="rollback"`.

    Attributes
    ----------
    guard:
        The `KLGuard` that judges, with history, findings and outlier tokens.
    decision:
        The last decision.
    halted:
        Whether the guard has stopped the run: look at it before the model is saved or pushed.

    Raises
    ------
    TypeError, ValueError
        For a knob that does not exist, a value that is not allowed, or an object of the wrong kind.
    ModuleNotFoundError
        For alerts by URL without the package apprise.

    Examples
    --------
    >>> guard = TorchGuard(action="halt")
    >>> for step in range(1, 60):
    ...     kl = 0.02 if step < 40 else 0.02 * 1.6 ** (step - 40)
    ...     if guard.step(step, kl):
    ...         break
    >>> step, guard.decision.action, guard.decision.reason.departure_step
    (51, 'halt', 40)
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        output_dir: str | os.PathLike[str] | None = None,
        extras: Mapping[str, Any] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        keep: int | None = None,
        on_rollback: Callable[[RollbackContext], Any] | None = None,
        expected_steps: int | None = None,
        token_text: TokenText | None = None,
        special_ids: Iterable[int] = (),
        alerts: Iterable[str] | str | None = None,
        on_incident: OnIncident | None = None,
        **overrides: Any,
    ) -> None:
        config = GuardConfig.build(config, **overrides)
        models = _by_name("model", model, "state_dict")
        optimizers = _by_name("optimizer", optimizer, "param_groups")
        schedulers = _by_name("scheduler", scheduler, "load_state_dict")
        if len(schedulers) == len(optimizers) == 1:
            schedulers = dict(zip(optimizers, schedulers.values(), strict=True))
        for name in schedulers:
            if name not in optimizers:
                raise ValueError(f"scheduler {name!r} has no optimizer of its name; there are: {', '.join(optimizers)}")
        for name, extra in (extras or {}).items():
            if not isinstance(extra, torch.Generator) and not callable(getattr(extra, "load_state_dict", None)):
                raise TypeError(
                    f"extras[{name!r}] must have state_dict and load_state_dict, got {type(extra).__name__}"
                )
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be a whole number of at least 1, or None, got {keep!r}")
        if on_rollback is not None and not callable(on_rollback):
            raise TypeError(f"on_rollback must be a function of one argument, or None, got {on_rollback!r}")
        self._state = None
        if models:
            self._state = TrainingState(models, optimizers, schedulers, scaler, extras, generators)
        self._saves = None if output_dir is None else Saves(Path(output_dir), keep)
        self._faults = Faults()
        if config.action == "rollback" and (self._state is None or self._saves is None or not optimizers):
            missing = [
                n for n, o in (("model", models), ("optimizer", optimizers), ("output_dir", output_dir)) if not o
            ]
            self._faults.say_once("back", f"this run cannot be taken back, only halted: give {' and '.join(missing)}")
            config = replace(config, action="halt")
        self.config = config
        self.guard = KLGuard(
            config,
            output_dir=output_dir,
            rank=ranks.rank(),
            expected_observations=expected_steps,
            token_text=token_text,
            alerts=alerts,
            on_incident=on_incident,
        )
        self.decision = Decision()
        self.halted = False
        self._way = None
        if self._state is not None and self._saves is not None:
            self._way = WayBack(self._state, self._saves, self.guard, self._faults, on_rollback)
        self._watch = TokenWatch(config.outlier_top_k, self._faults.fault, checked_ids(special_ids))
        self._at: int | None = None
        self._saved_once = False
        self._looked = False  # at which modules drop out

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self._at}, attempt={self.attempt}, halted={self.halted})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a TorchGuard belongs to the process that trains and cannot be pickled or copied: leave it out of what a "
            "worker is given"
        )

    @property
    def attempt(self) -> int:
        """0 for the run as started, one more for each rollback."""
        return self.guard.attempt

    @property
    def beta_factor(self) -> float:
        """What to multiply the weight of the KL penalty with: 1 until a rollback has changed it."""
        changes = self.guard.changes
        return 1.0 if changes is None else changes.beta

    def watch_loss(self, loss: Callable[P, R], **names: str) -> Callable[P, R]:
        """Return a loss function whose calls show the guard their tokens; the next `step` takes them in.

        Parameters
        ----------
        loss:
            Has arguments `policy_logprobs`, `ref_logprobs`, `mask` and maybe `token_ids`, [batch, tokens] each.
        **names:
            What it calls them, where it calls them otherwise: `ref_logprobs="ref_lp"`.

        Raises
        ------
        TypeError
            If it has no such argument.
        """
        return self._watch.wrap(loss, names)

    def resume(self, path: str | os.PathLike[str] | None = None, *, fresh: bool = False) -> int:
        """Begin: load the newest sound checkpoint of `output_dir`, or `path`, and return its step; 0 for a fresh start.

        To be called once before the first step. A rollback that an earlier process had decided on and did not get to is
        finished.

        Parameters
        ----------
        path:
            The checkpoint to load.
        fresh:
            Whether to begin anew; checkpoints of an earlier run in `output_dir` are renamed to `earlier-checkpoint-N`.

        Raises
        ------
        FileNotFoundError
            If there is no checkpoint in `path`.
        ValueError
            If the checkpoint in `path` cannot be loaded.
        KLGuardHalted
            If what was loaded is not what was saved.
        """
        if self._state is None or self._saves is None or self._way is None:
            self._at = 0
            return 0
        self._faults.guarded(self._clean)
        if fresh and ranks.rank() == 0 and self._owns_folder:
            self._faults.guarded(self._saves.put_earlier_aside)
        if not fresh and path is None and any(self._faults.shared(self._faults.guarded(self.guard.recover))):
            self.decision = self.guard.decision
            return self.rollback()
        chosen = None if fresh else self._faults.shared(os.fspath(path) if path is not None else self._newest())[0]
        if chosen is None:
            self._at = 0
            self._faults.guarded(self._keep_start)
            return 0
        folder = Path(chosen)
        if not folder.is_dir():
            raise FileNotFoundError(f"no checkpoint in {folder}")
        step = self._way.load(folder)
        self._faults.guarded(functools.partial(self.guard.resumed, step, present=self._saves.present()))
        checkpoint = self._way.known(step, folder)
        try:
            if checkpoint is None:
                self._note(step, folder)
            elif self.attempt > checkpoint.attempt:
                self._way.restored(checkpoint, None)
        except RestoreFailed as error:
            raise self._gave_up(self.decision, str(error)) from error
        self._at = step
        return step

    def step(
        self,
        step: int,
        kl_mean: Any = None,
        *,
        kl_max: Any = None,
        policy_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        tokens: Any = None,
        reward: Any = None,
        reward_std: Any = None,
        entropy: Any = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        beta: Any = None,
        window: int = 1,
    ) -> Decision:
        """Say that an optimizer step was made, and what it measured; return what to do.

        Parameters
        ----------
        step:
            Its number, from 1.
        kl_mean, kl_max, reward, reward_std, entropy, loss, grad_norm, learning_rate, beta, window:
            As `KLGuard.observe` takes them. The learning rate is read from the optimizer where it is not given.
        policy_logprobs, ref_logprobs, mask, token_ids:
            The step's tokens, [batch, tokens] each, in the place of `kl_mean`.
        tokens:
            The same as a `kl_guard.tokens.TokenSummary`, such as one merged over micro-batches.

        Returns
        -------
        Decision
            True in a test when there is something to do: `.action` is "halt" (leave the loop) or "rollback" (call
            `rollback`). The same on every process.

        Raises
        ------
        KLGuardHalted
            On a halt, with `on_halt="raise"`.
        """
        given = (policy_logprobs, ref_logprobs, mask)
        if any(one is not None for one in given):
            if any(one is None for one in given):
                missing = [name for name, one in zip(NAMES, given, strict=False) if one is None]
                self._faults.say_once("tokens", f"tokens are not seen: {' and '.join(missing)} missing")
            else:
                self._watch.add(*given, token_ids)
        if self._at is None and self.config.action == "rollback":
            self._faults.say_once("start", "resume() was not called before the first step: the start is not kept")
        self._at = step
        if not self._looked:
            self._looked = True
            self._faults.guarded(self._note_dropout)
        seen = self._watch.take()
        if tokens is None:
            tokens = seen
        rate = self._faults.guarded(self._rate) if learning_rate is None else learning_rate
        observe = functools.partial(
            self.guard.observe,
            step,
            kl_mean,
            kl_max=kl_max,
            tokens=tokens,
            reward=reward,
            reward_std=reward_std,
            entropy=entropy,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            beta=beta,
            window=window,
        )
        mine = self._faults.guarded(observe)
        self.decision = self._together(self.guard.decision if mine is None else mine)
        if self.decision.action == "halt" and not self.halted:
            self.halted = True
            self._faults.guarded(self._keep_halted, step)
        if self.halted and self.config.on_halt == "raise":
            raise KLGuardHalted(_why(self.decision), self.decision)
        return self.decision

    def save(self, step: int) -> Path | None:
        """Save everything that training has at a step; return where, None where it could not be done.

        Complete under its name by one rename, then pinned in the background. After a decision to halt or go back
        nothing is saved: it would be a bad checkpoint under a good name. What goes wrong is logged, never raised.

        Raises
        ------
        ValueError
            For a step that is no whole number of at least 0.
        """
        step = as_step(step)
        if self._state is None or self._saves is None:
            self._faults.say_once("save", "nothing is saved: give the guard a model and an output_dir")
            return None
        if self.decision:
            self._faults.say_once(f"bad {step}", f"step {step} is not saved: {self.decision.action} is decided")
            return None
        folder = self._saves.folder_of(step)
        if not self._write(folder, step):
            return None
        self._note(step, folder)
        if ranks.rank() == 0 and self._owns_folder:
            self._faults.guarded(self._saves.thin_out)
        return folder

    def rollback(self) -> int:
        """Go back as decided: restore everything in place, change what is to be done otherwise, check; return the step.

        Go on with the step after it. Later checkpoints are moved to `<output_dir>/kl_guard/quarantine/`.

        Raises
        ------
        RuntimeError
            If no rollback is decided.
        KLGuardHalted
            If there is nothing sound to go back to, or what was restored is not what was saved: training must not go
            on from it. The message has the reason.
        """
        decided = self.decision
        if self._way is None or decided.action != "rollback":
            raise RuntimeError(f"there is no rollback to make: the decision is {decided.action!r}")
        try:
            self._at = self._way.go(decided)
        except RestoreFailed as error:
            raise self._gave_up(decided, str(error)) from error
        self.decision = Decision()
        return self._at

    def close(self) -> None:
        """Finish what runs in the background, and close the files."""
        self.guard.close()

    def __enter__(self) -> TorchGuard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Deciding together.

    def _together(self, mine: Decision) -> Decision:
        """Return the decision of all processes."""
        if ranks.world_size() == 1:
            return mine
        try:
            if not ranks.any_rank(bool(mine), ranks.device()):
                return mine
        except Exception:
            self._faults.fault("agreeing with the other ranks")
            return mine
        decision, _ = settle(self.guard, mine, self._faults)
        return decision

    def _note_dropout(self) -> None:
        models = [] if self._state is None else self._state.models.values()
        found = [name for model in models for name in dropping(model, in_training=True)]
        if found:
            self.guard.note({"training_dropout": some(found)})

    def _rate(self) -> float | None:
        rates = (
            [] if self._state is None else [r for o in self._state.optimizers.values() for r in learning_rate.rates(o)]
        )
        return rates[0] if rates else None

    # Saving.

    def _write(self, folder: Path, step: int) -> bool:
        """Write a checkpoint, on every process; return whether it is there."""
        assert self._state is not None  # noqa: S101 - asked by the caller
        assert self._saves is not None  # noqa: S101 - asked by the caller
        why = self._saves.write(folder, functools.partial(self._state.write, step=step), self._put_aside)
        if why:
            self._faults.say_once(f"save: {why}", f"{folder.name} could not be saved: {why}")
        return not why

    def _put_aside(self, folder: Path) -> None:
        if not self.guard.checkpoints.move_aside([folder], self.attempt):
            folder.rename(unused(folder.with_name(f"replaced-{folder.name}")))

    def _note(self, step: int, folder: Path, take: bool = False) -> None:
        """Tell the guard of a checkpoint, with what a restored state is to be compared with; on every process."""
        assert self._state is not None  # noqa: S101 - asked by the caller
        if not self._saved_once:
            self._saved_once = step > 0  # at the start an optimizer has no state that could be unreadable
            try:
                self._state.read(folder)
            except Exception as error:
                self._faults.say_once("read", f"{folder} cannot be read back ({error}): the guard cannot go back to it")
                return
        everywhere = [one for one in self._faults.shared(self._faults.guarded(self._state.facts, step)) if one]
        facts: dict[str, Any] = {}
        if len(everywhere) == ranks.world_size():
            facts = {**everywhere[0], "weights": [one["weights"] for one in everywhere]}
        self._faults.guarded(functools.partial(self.guard.checkpoint_saved, step, folder, facts=facts, take=take))

    def _keep_start(self) -> None:
        """Keep the state before the first step, for trouble that begins before the first checkpoint."""
        if self.config.action != "rollback" or not self.config.pin_start:
            return
        assert self._state is not None  # noqa: S101 - rollback is only on with one
        why_not = self._no_room("start")
        if why_not:
            self._faults.say_once("start", f"the state at the start is not kept: {why_not}")
            return
        folder = self._own_folder("start") / "checkpoint-0"
        if self._write(folder, 0):
            self._note(0, folder, take=True)
        if ranks.rank() == 0:
            shutil.rmtree(folder.parent, ignore_errors=True)  # the checkpoint itself has become a pin

    def _keep_halted(self, step: int) -> None:
        if self._state is None or self._saves is None or not self.config.save_halted:
            return
        why_not = self._no_room("halted")
        if why_not:
            self._faults.say_once("halted", f"the halted state is not kept: {why_not}")
            return
        folder = self._own_folder("halted") / f"step-{step}"
        if self._write(folder, step) and ranks.rank() == 0:
            logger.warning("kl-guard: the halted state is in %s", folder)

    def _own_folder(self, name: str) -> Path:
        assert self._saves is not None  # noqa: S101 - asked by the caller
        return self._saves.folder / "kl_guard" / name

    def _no_room(self, name: str) -> str:
        """Return why nothing more can be saved there, "" where it can; the same on every process."""
        assert self._state is not None  # noqa: S101 - asked by the caller
        whole = nn.ModuleList(self._state.models.values())
        return next((why for why in self._faults.shared(why_no_room(self._own_folder(name), whole)) if why), "")

    def _newest(self) -> str | None:
        path = self._saves.newest_sound() if self._saves is not None and ranks.rank() == 0 else None
        return None if path is None else os.fspath(path)

    @property
    def _owns_folder(self) -> bool:
        """Whether no other guard has the folder, whose checkpoints are not this one's to delete or rename."""
        return not self.guard.refused

    def _clean(self) -> None:
        if ranks.rank() == 0 and self._saves is not None and self._owns_folder:
            self._saves.clean()
            shutil.rmtree(self._own_folder("start"), ignore_errors=True)

    def _gave_up(self, decided: Decision, why: str) -> KLGuardHalted:
        if self.guard.decision.action != "halt":
            self.guard.give_up(why)
        self.halted = True
        note = self.guard.decision.note or why
        self.decision = replace(decided, action="halt", note=note)
        return KLGuardHalted(f"not going on from a rollback: {note}", self.decision)


def _why(decision: Decision) -> str:
    reason = decision.reason
    return f"{reason.signature} at step {reason.step}: {reason.message}" if reason else "halted by another rank"


def _by_name(name: str, given: Any, needs: str) -> dict[str, Any]:
    """Return one object or several as several.

    Raises
    ------
    TypeError
        For an object of another kind.
    """
    if given is None:
        return {}
    found = dict(given) if isinstance(given, Mapping) else {"model": given}
    for key, one in found.items():
        if not hasattr(one, needs):
            where = f"{name}[{key!r}]" if isinstance(given, Mapping) else name
            raise TypeError(f"{where} must have {needs}, got {type(one).__name__}")
    return found
