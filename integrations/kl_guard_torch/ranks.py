"""What the processes of a distributed run tell each other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def world_size() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def any_rank(wants: bool, device: torch.device) -> bool:
    """Return whether any process wants to; every process must call this at the same place."""
    if world_size() == 1:
        return wants
    flag = torch.tensor([int(wants)], device=device, dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def largest(value: int, device: torch.device) -> int:
    """Return the largest `value` of all processes; every process must call this at the same place."""
    if world_size() == 1:
        return value
    shared = torch.tensor([value], device=device, dtype=torch.int32)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared.item())


def barrier() -> None:
    """Wait for every process; every process must call this at the same place."""
    if world_size() > 1:
        dist.barrier()


def gather(value: T) -> list[T]:
    """Return the `value` of every process, by rank; every process must call this at the same place."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def rank() -> int:
    """Return which of the processes this is."""
    return dist.get_rank() if world_size() > 1 else 0


def device() -> torch.device:
    """Return where tensors of the default group's collectives live."""
    if world_size() > 1 and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
