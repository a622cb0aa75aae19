"""Everything that training has at a step, written to a folder and put back in place."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kl_guard import learning_rate
from kl_guard_torch import ranks
from kl_guard_torch.facts import fingerprint, optimizer_steps
from kl_guard_torch.rng import random_state, set_random_state
from kl_guard_torch.sharded import Shards, is_sharded

logger = logging.getLogger("kl_guard")

WEIGHTS, OPTIMIZERS, PROGRESS = "weights.pt", "optimizers.pt", "progress.pt"
SHARDS = "shards"


class TrainingState:
    """The objects of a training run whose state makes a checkpoint complete.

    Parameters
    ----------
    models, optimizers, schedulers:
        By name; wrapped ones (DDP, `torch.compile`, accelerate) too.
    scaler:
        A gradient scaler; None without.
    extras:
        Whatever else has a state, by name: a data loader, a sampler, a moving average, a `torch.Generator`.
    generators:
        The generators that sampling draws from, by name.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Any],
        schedulers: Mapping[str, Any],
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> None:
        self.models = {name: _unwrapped(model) for name, model in models.items()}
        self.optimizers = dict(optimizers)
        self.schedulers = dict(schedulers)
        self.scaler = scaler
        self.extras = dict(extras or {})
        self.generators = dict(generators or {})
        self._refused: set[str] = set()
        self._shards = None
        if any(is_sharded(model) for model in self.models.values()):
            self._shards = Shards(self.models, self.optimizers)

    def facts(self, step: int) -> dict[str, Any]:
        """Return what this process can say about the state, as plain values; `weights` is a checksum."""
        pairs = [(o, self.schedulers.get(name)) for name, o in self.optimizers.items()]
        return {
            "global step": step,
            "weights": fingerprint(*self.models.values()),
            "optimizer steps": [optimizer_steps(optimizer) for optimizer, _ in pairs],
            "learning rate": [rate for optimizer, _ in pairs for rate in learning_rate.rates(optimizer)],
            "base learning rate": [rate for _, s in pairs for rate in learning_rate.base_rates(s)],
            "scheduler": [getattr(one, "last_epoch", None) for _, s in pairs for one in learning_rate.schedulers(s)],
        }

    def write(self, folder: Path, *, step: int) -> None:
        """Write this process's part. Every process must call this.

        Raises
        ------
        OSError, RuntimeError
            If it cannot be written.
        """
        if self._shards is not None:
            self._shards.write(folder / SHARDS)
        elif ranks.rank() == 0:
            torch.save({name: model.state_dict() for name, model in self.models.items()}, folder / WEIGHTS)
            torch.save({name: _plain(o.state_dict()) for name, o in self.optimizers.items()}, folder / OPTIMIZERS)
        if ranks.rank() == 0:
            schedulers = {name: _plain(s.state_dict()) for name, s in self.schedulers.items()}
            scaler = None if self.scaler is None else self.scaler.state_dict()
            torch.save({"step": step, "schedulers": schedulers, "scaler": scaler}, folder / PROGRESS)
        own = {
            "random": random_state(self.generators),
            "extras": dict(self._extras()),
            "buffers": {name: dict(_unsaved_buffers(model)) for name, model in self.models.items()},
        }
        torch.save(own, folder / _own(ranks.rank()))

    def read(self, folder: Path) -> dict[str, Any]:
        """Return what a folder holds, on the CPU; nothing is changed yet.

        Raises
        ------
        OSError, RuntimeError, ValueError, pickle.UnpicklingError
            If it cannot be read.
        """
        names = [PROGRESS] if self._shards is not None else [WEIGHTS, OPTIMIZERS, PROGRESS]
        read = {name: torch.load(folder / name, map_location="cpu", weights_only=True) for name in names}
        own = folder / _own(ranks.rank())
        if not own.exists():
            logger.warning("kl-guard: %s is missing: random state and extras of this process stay as they are", own)
            return {**read, SHARDS: folder / SHARDS}
        return {**read, SHARDS: folder / SHARDS, "own": torch.load(own, map_location="cpu", weights_only=True)}

    def put(self, read: Mapping[str, Any]) -> int:
        """Put back what `read` returned, in place; return its step. Every process must call this.

        Raises
        ------
        RuntimeError, ValueError, KeyError
            Where it does not fit: the model or the optimizer is another one.
        """
        if self._shards is not None:
            self._shards.put(read[SHARDS])
        else:
            for name, model in self.models.items():
                model.load_state_dict(read[WEIGHTS][name])
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(read[OPTIMIZERS][name])
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(_typed(read[PROGRESS]["schedulers"][name], scheduler.state_dict()))
        if self.scaler is not None and read[PROGRESS]["scaler"] is not None:
            self.scaler.load_state_dict(read[PROGRESS]["scaler"])
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        if "own" in read:
            self._put_own(read["own"])
        return int(read[PROGRESS]["step"])

    def _put_own(self, own: Mapping[str, Any]) -> None:
        for name, model in self.models.items():
            kept = own["buffers"].get(name, {})
            for buffer_name, buffer in _unsaved_buffers(model):
                if buffer_name in kept:
                    buffer.copy_(kept[buffer_name])
        for name, extra in self.extras.items():
            if name in own["extras"]:
                _put_extra(extra, own["extras"][name])
            elif name not in self._refused:
                logger.warning("kl-guard: the checkpoint holds no state of %r, which stays as it is", name)
        for text in set_random_state(own["random"], self.generators):
            logger.warning("kl-guard: not restored: %s", text)

    def _extras(self) -> Iterator[tuple[str, Any]]:
        """Yield the state of each extra but those that raise, or that only unpickling could read: said once."""
        for name, extra in self.extras.items():
            try:
                state = extra.get_state() if isinstance(extra, torch.Generator) else extra.state_dict()
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:
                if name not in self._refused:
                    self._refused.add(name)
                    logger.warning(
                        "kl-guard: the state of %r is not saved, and will not be restored: it must be made of tensors "
                        "and plain values (%s)",
                        name,
                        next(iter(str(error).splitlines()), repr(error)),
                    )
                continue
            yield name, state


def _own(rank: int) -> str:
    return f"rank-{rank}.pt"


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile`, so that a checkpoint does not depend on them."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _unsaved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers that a state dict leaves out."""
    for prefix, part in model.named_modules():
        for name in part._non_persistent_buffers_set:
            buffer = part._buffers.get(name)
            if buffer is not None:
                yield f"{prefix}.{name}", buffer.detach()


def _put_extra(extra: Any, state: Any) -> None:
    if isinstance(extra, torch.Generator):
        extra.set_state(state)
    else:
        extra.load_state_dict(state)


def _plain(value: Any) -> Any:
    """Return a state without types of its own (counters, numpy's numbers), which a safe loader refuses."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value] if isinstance(value, list) else tuple(_plain(item) for item in value)
    return value


def _typed(saved: Any, now: Any) -> Any:
    """Return what `_plain` made of a state with the counters that the object itself has."""
    if isinstance(now, Counter) and isinstance(saved, dict):
        return Counter(saved)
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _typed(value, now.get(key)) for key, value in saved.items()}
    if isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        return [_typed(value, other) for value, other in zip(saved, now, strict=True)]
    return saved
