"""The random state of a process: every stream that training may draw from, as plain values and tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's streams, of every CUDA device's, and of `generators`.

    Tensors and plain values only, so that `torch.load(weights_only=True)` reads it.
    """
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": torch.get_rng_state(),
        "generators": {name: generator.get_state() for name, generator in (generators or {}).items()},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # of torch
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None) -> list[str]:
    """Put back what `random_state` returned; return in words what could not be put back."""
    missing = []
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["gauss"]))
    torch.set_rng_state(state["torch"])
    devices = state.get("cuda")
    if devices is not None:
        if torch.cuda.is_available() and torch.cuda.device_count() == len(devices):
            torch.cuda.set_rng_state_all(devices)
        else:
            missing.append(f"the random state of {len(devices)} CUDA devices")
    saved = state.get("generators", {})
    for name, generator in (generators or {}).items():
        if name in saved:
            generator.set_state(saved[name])
        else:
            missing.append(f"the random state of generator {name!r}")
    return missing
