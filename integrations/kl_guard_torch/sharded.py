"""Sharded models (FSDP, tensor parallel): saved and loaded through `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load, save  # type: ignore[attr-defined]  # of torch
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process holds only a part of the model."""
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        return True
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


class Shards:
    """Models and optimizers of which every process holds a part; each optimizer belongs to the model of its name."""

    def __init__(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Any]) -> None:
        self._models = models
        self._optimizers = optimizers

    def write(self, folder: Path) -> None:
        """Write the parts of all processes, together; on every process."""
        save({name: self._state(name, self._begun(name)) for name in self._models}, checkpoint_id=folder)

    def put(self, folder: Path) -> None:
        """Read the parts and put them in place; on every process. The number of processes may have changed."""
        keys = FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, model in self._models.items():
            begun = any(key.startswith(f"{name}.optimizer.") for key in keys)
            state = {name: self._state(name, begun)}
            load(state, checkpoint_id=folder)
            dcp_state.set_model_state_dict(model, state[name]["model"])
            for optimizer in self._of(name):
                if begun:
                    dcp_state.set_optimizer_state_dict(model, optimizer, state[name]["optimizer"])
                else:
                    optimizer.state.clear()

    def _state(self, name: str, begun: bool) -> dict[str, Any]:
        model = self._models[name]
        state: dict[str, Any] = {"model": dcp_state.get_model_state_dict(model)}
        if begun:
            state["optimizer"] = dcp_state.get_optimizer_state_dict(model, self._of(name))
        return state

    def _begun(self, name: str) -> bool:
        """Return whether the optimizer has moments: torch would make a step of its own to fill empty ones."""
        return any(optimizer.state for optimizer in self._of(name))

    def _of(self, name: str) -> list[Any]:
        optimizer: Any = self._optimizers.get(name)
        while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
            optimizer = optimizer.optimizer
        return [] if optimizer is None else [optimizer]
