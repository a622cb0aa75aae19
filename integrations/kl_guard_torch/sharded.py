"""Sharded models (FSDP, tensor parallel): saved and loaded through `torch.distributed.checkpoint`.

torch itself unpickles two things there: the list of what there is, and whatever is no tensor. Here both are read so
that nothing in them can run.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load, save  # type: ignore[attr-defined]  # of torch
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
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
        """Read the parts and put them in place; on every process. The number of processes may have changed.

        Raises
        ------
        OSError, RuntimeError, pickle.UnpicklingError
            If they cannot be read, or hold anything else than tensors and plain values.
        """
        check_list(folder)
        keys = FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, model in self._models.items():
            begun = any(key.startswith(f"{name}.optimizer.") for key in keys)
            state = {name: self._state(name, begun)}
            try:
                load(state, checkpoint_id=folder, planner=PlainPlanner())
            except CheckpointException as error:  # no Exception to Python: it would pass through everything
                why = "; ".join(f"rank {rank}: {one[0]}" for rank, one in error.failures.items())
                raise RuntimeError(f"{folder} cannot be read: {why}") from error
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


class PlainPlanner(DefaultLoadPlanner):
    """Reads what is no tensor as plain values, where torch's own planner unpickles it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value in place.

        Raises
        ------
        pickle.UnpicklingError
            If it is no plain value.
        """
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


_METADATA = "torch.distributed.checkpoint.metadata"
_LISTED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class _ListReader(pickle.Unpickler):
    """Knows the few kinds of object that the list of a checkpoint's contents is made of."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of them.

        Raises
        ------
        pickle.UnpicklingError
            For any other.
        """
        if (module, name) in _LISTED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the list of what a checkpoint holds")


def check_list(folder: Path) -> None:
    """Read the list of what a checkpoint holds as far as it is harmless.

    Raises
    ------
    pickle.UnpicklingError
        If it holds anything else than such a list does.
    OSError
        If it cannot be read.
    """
    with (folder / ".metadata").open("rb") as file:
        _ListReader(file).load()
