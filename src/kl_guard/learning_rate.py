"""Scaling a learning rate so that it lasts: in the optimizer and in its scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_IN_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")  # what torch schedulers keep in a parameter group
_IN_SCHEDULER = ("base_lrs", "min_lrs", "max_lrs", "delta_lrs", "_last_lr")


def scale(optimizer: Any, scheduler: Any, factor: float) -> None:
    """Multiply the learning rate by `factor`, now and for all later steps.

    The parameter groups alone would last one step, since a scheduler computes the next rate from its base rates; a
    scheduler alone would leave the step at hand as it is. Any torch optimizer and scheduler, wrapped ones too
    (`accelerate`, DeepSpeed); schedulers made of schedulers are followed inside.

    Parameters
    ----------
    optimizer:
        Has `param_groups`.
    scheduler:
        Has `base_lrs` or what its kind has instead; None where there is none.
    factor:
        Above 0.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 0.25, "initial_lr": 0.5}])
    >>> scheduler = SimpleNamespace(base_lrs=[0.5])
    >>> scale(optimizer, scheduler, 0.5)
    >>> optimizer.param_groups[0]["lr"], scheduler.base_lrs
    (0.125, [0.25])
    """
    for group in optimizer.param_groups:
        for name in _IN_GROUP:
            if name in group and group[name] is not None:
                group[name] = group[name] * factor  # a tensor stays a tensor
    for one in schedulers(scheduler):
        for name in _IN_SCHEDULER:
            rates = getattr(one, name, None)
            if isinstance(rates, (list, tuple)):
                setattr(one, name, [rate * factor for rate in rates])
        if isinstance(getattr(one, "eta_min", None), (int, float)):  # the floor of a cosine
            one.eta_min = one.eta_min * factor


def schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler without its wrapper, and those inside it."""
    inner = getattr(scheduler, "scheduler", None)  # accelerate's wrapper
    if inner is not None:
        yield from schedulers(inner)
        return
    if scheduler is not None:
        yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from schedulers(part)


def rates(optimizer: Any) -> list[float]:
    """Return the learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def base_rates(scheduler: Any) -> list[float]:
    """Return the base rates of a scheduler and of those inside it; [] where it has none."""
    return [float(rate) for one in schedulers(scheduler) for rate in getattr(one, "base_lrs", ())]
