"""What Lightning keeps to itself and halting or going back has to touch: here and nowhere else, checked when used."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

_LIMITS = (("fit_loop", "min_epochs"), ("fit_loop.epoch_loop", "min_steps"))


def lift_least(trainer: Any) -> dict[str, Any] | None:
    """Let `trainer.should_stop` count at once, whatever `min_steps` and `min_epochs` say.

    Returns what was there before, for `put_least_back`; None where this version keeps its limits elsewhere.
    """
    before: dict[str, Any] = {}
    for path, name in _LIMITS:
        loop = _follow(trainer, path)
        if loop is None or not hasattr(loop, name):
            put_least_back(trainer, before)
            return None
        before[name] = getattr(loop, name)
        setattr(loop, name, None)
    return before


def put_least_back(trainer: Any, before: Mapping[str, Any]) -> None:
    """Put back what `lift_least` took away."""
    for path, name in _LIMITS:
        if name in before:
            setattr(_follow(trainer, path), name, before[name])


def _follow(thing: Any, path: str) -> Any:
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing


def why_not_back(trainer: Any) -> str:
    """Return why a run of this trainer cannot be taken back in the same process, "" where it can."""
    launcher = getattr(getattr(trainer, "strategy", None), "launcher", None)
    if "MultiProcessing" in type(launcher).__name__ or "XLA" in type(launcher).__name__:
        return (
            "this strategy starts its processes anew inside of each fit (spawn, fork, notebooks), so nothing outlives "
            "one. The guard halts instead; strategy='ddp' makes rollback possible"
        )
    plugin = getattr(getattr(trainer, "strategy", None), "checkpoint_io", None)
    if any("Async" in cls.__name__ for cls in type(plugin).__mro__) and not hasattr(plugin, "_ensure_setup"):
        return "this version of AsyncCheckpointIO saves nothing after its first fit. The guard halts instead"
    return ""


def fit_arguments(trainer: Any, weights_only: bool | None) -> dict[str, Any]:
    """Return `weights_only` for `trainer.fit` where it is given and this version knows it (since 2.6)."""
    known = "weights_only" in inspect.signature(trainer.fit).parameters
    return {"weights_only": weights_only} if known and weights_only is not None else {}


def send_logs(trainer: Any) -> None:
    """Send loggers what this batch has logged, as the trainer does after it, whether or not a log is due.

    Every process must call this. Nothing is sent where this version of Lightning does it in another way.
    """
    connector: Any = getattr(trainer, "_logger_connector", None)
    if trainer.log_every_n_steps and hasattr(connector, "log_metrics") and hasattr(connector, "metrics"):
        connector.log_metrics(connector.metrics["log"])


def ends_epoch(trainer: Any) -> bool:
    """Return whether the last batch of an epoch was trained on just now."""
    return bool(getattr(_follow(trainer, "fit_loop.epoch_loop.batch_progress"), "is_last_batch", False))


def loaders(trainer: Any) -> Iterator[Any]:
    """Yield the training data loaders, of however nested collections."""
    yield from _flat(trainer.train_dataloader)


def _flat(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        for part in thing.values():
            yield from _flat(part)
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _flat(part)
    elif thing is not None:
        yield thing


def went_back(callback: Any, step: int) -> None:
    """Let a checkpoint callback save the steps after this one again, and this one not: it is saved."""
    for name, value in (("_last_global_step_saved", step), ("_last_checkpoint_saved", "")):
        if hasattr(callback, name):
            setattr(callback, name, value)
