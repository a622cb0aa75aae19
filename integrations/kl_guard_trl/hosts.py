"""What a TRL trainer's arguments mean for the guard: which KL it logs, and what will limit the guard."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_guard import GuardConfig
from kl_guard.config import KLKind
from kl_guard.messages import reach

EARLY = 10  # steps within which a first checkpoint is early enough
NEEDED = 64  # steps behind an alarm that a departure may lie, for most blow-ups

# What `kl` in the logs is, by the class of the arguments (TRL 1.0 to 1.16: the trainers' `_metrics[...]["kl"]`).
_KINDS: dict[str, KLKind | None] = {
    "AsyncGRPOConfig": "sampler",
    "KTOConfig": None,  # a batch estimate for the loss, not a distance that grows with training
    "RLOOConfig": "k1",
    "GRPOConfig": "k3",
}


def kl_kind_of(args: Any) -> KLKind | None:
    """Return the kind of KL that a trainer with these arguments logs as `kl`; None for one not to be watched."""
    for cls in type(args).__mro__:
        if cls.__name__ in _KINDS:
            return _KINDS[cls.__name__]
    return "k3"


def _strategy(value: Any) -> str:
    """Return the name of a logging or save strategy, which may be an enum."""
    return str(getattr(value, "value", value))


def _interval(args: Any, state: Any, name: str) -> int:
    """Return `logging_steps` or `save_steps` in steps: it may be a share of the run, which the state has resolved."""
    every = getattr(state, name, None) or getattr(args, name)
    return int(every) if every >= 1 else max(1, int(state.max_steps * every))


def _steps_per_epoch(state: Any) -> int:
    return max(1, int(state.max_steps) // max(1, round(state.num_train_epochs or 1)))


def steps_per_log(args: Any, state: Any) -> int:
    """Return how many steps one log averages; 0 where nothing is logged."""
    strategy = _strategy(args.logging_strategy)
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return _steps_per_epoch(state)
    return _interval(args, state, "logging_steps")


def limits(
    args: Any, state: Any, config: GuardConfig, why_not_back: str | None, *, by_step: bool = False
) -> Iterator[str]:
    """Yield one line for each thing about this run that limits what the guard can see or do.

    `why_not_back` says why this trainer cannot be taken back: "" where it can, None where it is not attached; `by_step`
    that each optimizer step is observed, whatever is logged.
    """
    yield from _what_is_seen(args, state, config, by_step)
    yield from _what_is_saved(args, state, config.pin_checkpoints)
    if getattr(args, "logging_nan_inf_filter", False):
        yield "logging_nan_inf_filter is on: the logged loss hides NaN and inf, so a sound loss proves nothing"
    if config.action == "rollback":
        yield from _going_back(args, state, config, why_not_back)
    if getattr(args, "push_to_hub", False) and config.on_halt == "return":
        yield (
            "push_to_hub is on: train() returns normally after a halt, so look at callback.halted before the model is "
            "pushed, or set on_halt='raise'"
        )
    if getattr(args, "load_best_model_at_end", False):
        yield "load_best_model_at_end is on: after a halt the model holds the best checkpoint, not the halted state"


def _going_back(args: Any, state: Any, config: GuardConfig, why_not_back: str | None) -> Iterator[str]:
    first = _first_save(args, state)
    if EARLY < first < state.max_steps:
        start_is_kept = why_not_back == "" and config.pin_start and config.pin_checkpoints
        way = "the state at the start is the only way back" if start_is_kept else "there is no way back"
        yield f"nothing is saved before step {first}: for trouble that begins earlier {way}"
    if why_not_back is None:
        yield (
            "action='rollback' needs callback.attach(trainer) before trainer.train(); without it the guard halts and "
            "names the checkpoint to go back to"
        )
    elif why_not_back:
        yield f"action='rollback' is not possible here: {why_not_back}"
    elif getattr(args, "ignore_data_skip", False):
        yield "ignore_data_skip is on: after a rollback the data begin anew instead of going on from the checkpoint"


def _first_save(args: Any, state: Any) -> int:
    """Return the step of the first checkpoint; 0 where none is saved on the way."""
    strategy = _strategy(args.save_strategy)
    if strategy == "steps":
        return _interval(args, state, "save_steps")
    return _steps_per_epoch(state) if strategy == "epoch" else 0


def steps_per_kl(args: Any, state: Any, config: GuardConfig, *, by_step: bool) -> int:
    """Return how many steps lie between two KLs that the guard gets to see; 0 where it gets none."""
    if not by_step:
        return steps_per_log(args, state)
    return config.probe_every if getattr(args, "beta", None) == 0 and config.probe == "auto" else 1


def _what_is_seen(args: Any, state: Any, config: GuardConfig, by_step: bool) -> Iterator[str]:
    name = type(args).__name__
    beta = getattr(args, "beta", None)
    every = steps_per_kl(args, state, config, by_step=by_step)
    if beta == 0 and not (by_step and config.probe == "auto"):
        probe = "probe='auto' measures KL in some steps" if by_step else "attach(trainer) and probe='auto' measure it"
        yield (
            "beta is 0: there is no reference model and no `kl` is logged, so a blow-up cannot be seen; beta=1e-8 "
            f"makes TRL log it, for one forward pass of the reference per batch; {probe}"
        )
    elif beta is None:
        yield f"{name} has no beta: unless the trainer logs `kl`, a blow-up cannot be seen"
    if every == 0:
        yield "logging_strategy is 'no': nothing is logged, so nothing is observed"
        return
    micro = args.gradient_accumulation_steps
    if every > 1 and not by_step:
        yield (
            f"logging_steps is {every}: an observation averages {every} steps, so a one-step spike of S shows as "
            f"S/{every}, and a decision comes up to {every} steps later; attach(trainer) observes every step, "
            f"logging_steps=1 avoids both"
        )
    if micro > 1 and not by_step:
        yield (
            f"gradient_accumulation_steps is {micro}: a step averages {micro} micro-batches, so a spike of S in one "
            f"shows as S/{micro}"
        )
    yield reach(config, state.max_steps // every, every)


def on_generation_boundary(args: Any, step: int) -> bool:
    """Return whether a checkpoint of `step` lies between two generations, so that resuming from it is exact.

    In the middle of one, GRPO and RLOO have rollouts buffered that no checkpoint holds.
    """
    block = (getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1)
    return step * int(args.gradient_accumulation_steps) % int(block) == 0


def _what_is_saved(args: Any, state: Any, pins: bool) -> Iterator[str]:
    strategy = _strategy(args.save_strategy)
    if strategy == "no":
        yield (
            "save_strategy is 'no': no checkpoint is saved, so after a halt there is none to go back to (the state at "
            "the halt is saved all the same; save_halted=False switches that off)"
        )
        return
    limit = args.save_total_limit
    help_text = (
        "; the guard's pins (up to five, each as large as a checkpoint once rotation has taken it) keep the way back"
        if pins
        else ""
    )
    if strategy != "steps":
        if limit == 1:
            yield f"save_total_limit is 1: the only checkpoint kept may be from after the departure{help_text}"
        return
    every = _interval(args, state, "save_steps")
    if every >= state.max_steps:
        yield f"save_steps is {every} of {state.max_steps} steps: before the end there is no checkpoint to go back to"
    elif limit is not None and (limit == 1 or limit * every < NEEDED):
        yield (
            f"save_total_limit is {limit} with save_steps {every}: when an alarm comes, the newest {limit} of the "
            f"checkpoints may all be from after the departure"
            + (help_text or f"; keep at least {max(2, -(-NEEDED // every) + 1)}")
        )


# What a training log holds, and its name as an observation.
_KEYS = {
    "kl": "kl_mean",
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


def values_of(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a training log says as an observation."""
    values = {name: logs[key] for key, name in _KEYS.items() if key in logs}
    if "kl" in logs and logs["kl"] is None:
        values["kl_mean"] = math.nan  # TRL leaves NaN out before it averages: None is a window of nothing but NaN
    return values


def other_kls(logs: Mapping[str, Any]) -> list[str]:
    """Return the keys of a log that seem to be a KL, but not the one to watch."""
    ours = "kl_guard/"
    return [
        key for key in logs if key != "kl" and not key.startswith(ours) and "kl" in re.split(r"[^a-z]+", key.lower())
    ]


def training_logs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the training logs of a trainer's history, each with the steps it averages."""
    training = [row for row in rows if "loss" in row and "step" in row]
    last = 0
    out: list[dict[str, Any]] = []
    for row in training:
        out.append({**row, "window": max(1, row["step"] - last)})
        last = row["step"]
    return out


def of_one_run(checkpoint: Path, rows: list[dict[str, Any]]) -> bool:
    """Return whether a checkpoint is of the run that has logged `rows`: one history is the beginning of the other."""
    try:
        theirs = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(json.dumps(a, default=str) == json.dumps(b, default=str) for a, b in zip(theirs, rows, strict=False))
