"""What a saved state looked like, in a few numbers, and whether a restored one looks the same."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kl_guard import learning_rate

BLOCK = 1024  # elements
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RestoreFailed(Exception):  # noqa: N818 - it never leaves the adapters
    """What was restored is not what was saved, or nothing could be; training must not go on from it."""


def facts_of(model: torch.nn.Module, optimizer: Any, scheduler: Any, step: int) -> dict[str, Any]:
    """Return what this process can say about the state of training, as plain values.

    `weights` is a checksum over all tensors that this process holds; see `fingerprint`.
    """
    return {
        "global step": step,
        "weights": fingerprint(model),
        "optimizer steps": optimizer_steps(optimizer),
        "learning rate": learning_rate.rates(optimizer),
        "base learning rate": learning_rate.base_rates(scheduler),
        "scheduler": [getattr(one, "last_epoch", None) for one in learning_rate.schedulers(scheduler)],
    }


def differences(expected: Mapping[str, Any], found: Mapping[str, Any], lr_factor: float) -> Iterator[str]:
    """Yield each check that fails: its name, what was expected, what is there.

    Parameters
    ----------
    expected:
        Facts at the save.
    found:
        Facts now.
    lr_factor:
        By how much the learning rate was changed on purpose.
    """
    for name, was in expected.items():
        now = found.get(name)
        if name in {"learning rate", "base learning rate"}:
            want = [rate * lr_factor for rate in was]
            same = len(want) == len(now or []) and all(
                math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-300) for a, b in zip(want, now or [], strict=True)
            )
        else:
            want, same = was, was == now
        if not same:
            yield f"{name}: {want} was expected, {now} is there"


def fingerprint(*modules: torch.nn.Module) -> str:
    """Return a checksum over all parameters and saved buffers that this process holds, shards as they are.

    The bits of each tensor are summed as whole numbers, modulo 2^64: exact in any order, one pass on the tensor's own
    device with hardly any memory, and one small copy to the CPU for all of them. Blocks have different weights, so that
    parts in each other's place do not come out the same.
    """
    digest = hashlib.sha256()
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in itertools.chain.from_iterable(_tensors(module) for module in modules):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        sums.setdefault(tensor.device, []).append(_bit_sum(tensor))
    for parts in sums.values():
        digest.update(torch.stack(parts).cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in itertools.chain(module.named_parameters(), _persistent_buffers(module)):
        local = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3: this process's part; the parameter itself is empty
        local = local.to_local() if hasattr(local, "to_local") else local  # FSDP2: this process's shard
        if local.device.type != "meta":
            yield name, local.detach()


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a checkpoint holds; caches, such as those of rotary embeddings, change as they like."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in getattr(part, "_non_persistent_buffers_set", ()):
                yield f"{prefix}.{name}", buffer


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    bits = tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])
    whole = bits.numel() // BLOCK * BLOCK
    total = bits[whole:].sum(dtype=torch.int64)
    if whole:
        blocks = bits[:whole].view(-1, BLOCK).sum(dim=1, dtype=torch.int64)
        total = total + (blocks * torch.arange(3, 2 * len(blocks) + 3, 2, device=bits.device)).sum()
    return total


def optimizer_steps(optimizer: Any) -> int | None:
    """Return how many steps an optimizer has made, None where it does not count them or has made none."""
    while hasattr(optimizer, "optimizer"):  # wrappers of accelerate and DeepSpeed
        optimizer = optimizer.optimizer
    states = [state for state in getattr(optimizer, "state", {}).values() if isinstance(state, Mapping)]
    counts = [torch.as_tensor(part["step"]) for part in [*states, *optimizer.param_groups] if "step" in part]
    if not counts:
        return None
    devices = {count.device for count in counts}
    return int(max(torch.stack([c for c in counts if c.device == device]).max() for device in devices))
