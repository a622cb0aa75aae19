"""kl-guard for any torch loop."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as err:
    if err.name != "torch":
        raise
    raise ModuleNotFoundError(
        "kl_guard_torch needs torch. Install it with: pip install 'kl-guard[torch]'", name=err.name
    ) from err

from kl_guard_torch.changes import RollbackContext
from kl_guard_torch.guard import TorchGuard

__all__ = ["RollbackContext", "TorchGuard"]
