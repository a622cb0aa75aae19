"""Which versions of what matters to a run are loaded."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from kl_guard._version import __version__

# Module and distribution.
_TELLING = {
    "torch": "torch",
    "transformers": "transformers",
    "trl": "trl",
    "accelerate": "accelerate",
    "peft": "peft",
    "deepspeed": "deepspeed",
    "vllm": "vllm",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "numpy": "numpy",
}


def versions() -> dict[str, str]:
    """Return versions by name: the guard's, Python's, and those of the frameworks that this process has loaded."""
    found = {"kl_guard": __version__, "python": platform.python_version()}
    for module, distribution in _TELLING.items():
        if module in sys.modules:
            try:
                found[module] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    return found
