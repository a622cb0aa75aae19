"""What about a run limits what the guard can see or do: said at the start, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kl_guard import GuardConfig
from kl_guard.messages import reach
from kl_guard_lightning import internals
from kl_guard_lightning.base import saves_checkpoints


def is_resumable(trainer: Any) -> bool:
    """Return whether the data go on where a checkpoint was saved: loaders that keep their place in their state."""
    loaders = list(internals.loaders(trainer))
    return bool(loaders) and all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders)


def expected_steps(trainer: Any) -> int | None:
    """Return how many optimizer steps the run will make; None where it has no end that is known."""
    try:
        steps = trainer.estimated_stepping_batches
    except Exception:  # it asks the user's data for its length, and whatever that raises is not about training
        return None
    return int(steps) if isinstance(steps, (int, float)) and 0 < steps < 2**53 else None


def limits(trainer: Any, config: GuardConfig, folder: Path | None, why_not_back: str | None) -> Iterator[str]:
    """Yield the lines; `why_not_back` is None outside of `fit_with_rollback`, "" where going back is possible."""
    if trainer.barebones:
        yield "Trainer(barebones=True) logs nothing: only tokens that training_step returns are seen"
    yield reach(config, expected_steps(trainer), 1)
    micro = trainer.accumulate_grad_batches
    if micro > 1:
        yield f"accumulate_grad_batches is {micro}: a step averages {micro} batches, so a spike of S shows as S/{micro}"
    least = [f"{name} is {n}" for name in ("min_steps", "min_epochs") if (n := getattr(trainer, name) or 0) > 1]
    if least and config.action != "warn":
        yield f"{' and '.join(least)}: trainer.should_stop waits for it, a halt of the guard does not"
    if config.action == "rollback" and why_not_back is None:
        yield (
            "action='rollback' needs fit_with_rollback(trainer, module, ...) in the place of trainer.fit; without it "
            "the guard halts and names the checkpoint to go back to"
        )
    elif config.action == "rollback" and why_not_back:
        yield f"action='rollback' is not possible here: {why_not_back}"
    elif config.action == "rollback" and not is_resumable(trainer):
        yield (
            "the data loader does not keep its place (no state_dict and load_state_dict): after a rollback in the "
            "middle of an epoch the data are not those of a run that was never interrupted. torchdata's "
            "StatefulDataLoader is one that does"
        )
    savers = [callback for callback in trainer.callbacks if saves_checkpoints(callback)]
    if not savers:
        yield "no checkpoint callback: after a halt there is no checkpoint to go back to"
    if savers and all(getattr(callback, "save_weights_only", False) for callback in savers):
        yield "save_weights_only is on: weights can be gone back to by hand, training cannot go on from them"
    for callback in savers:
        place = getattr(callback, "dirpath", None)
        if place and folder is not None and "://" not in str(place):
            inside = Path(place).resolve().is_relative_to(folder.parent.resolve())
            if not inside:
                yield (
                    f"checkpoints go to {place}, outside of {folder.parent}: later ones stay there after a rollback. "
                    f"KLGuardCallback(output_dir=...) names a folder that holds both"
                )
