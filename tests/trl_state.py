"""Hashes of everything that makes a step of training come out as it does."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import torch
from transformers import TrainerCallback


def local(tensor):
    """The part of a tensor that this process holds: FSDP's shard, ZeRO-3's partition."""
    tensor = getattr(tensor, "ds_tensor", tensor)
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def tensors_of(value):
    """All tensors in an optimizer's state, in a fixed order."""
    if torch.is_tensor(value):
        yield local(value)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors_of(value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_of(part)


def digest(tensors):
    """One hash over the bytes of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def inner(optimizer):
    """An optimizer without its wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def moments_of(trainer):
    """The optimizer's state on this process; with ZeRO its groups hold no parameters, and it has masters besides."""
    optimizer = inner(trainer.optimizer)
    engine = getattr(trainer.optimizer, "optimizer", None)
    masters = [getattr(engine, n, []) for n in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")]
    params = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    states = [optimizer.state[p] for p in params] or list(optimizer.state.values())
    assert states or not trainer.state.global_step
    return [*masters, states]


def state_of(trainer):
    """Weights, optimizer state, random state of this process, as short hashes."""
    sha = hashlib.sha256(repr((random.getstate(), np.random.get_state())).encode())
    sha.update(torch.get_rng_state().numpy().tobytes())
    weights = itertools.chain(trainer.model.parameters(), trainer.model.buffers())
    return digest(map(local, weights)), digest(tensors_of(moments_of(trainer))), sha.hexdigest()[:16]


class Record(TrainerCallback):
    """Notes the state after each step: `states[step]`, that of the last time where a step is made again."""

    def __init__(self):
        self.trainer = None
        self.states = {}
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        self.states[state.global_step] = state_of(self.trainer)
