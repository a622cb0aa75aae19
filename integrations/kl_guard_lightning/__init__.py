"""kl-guard for Lightning: `trainer = Trainer(..., callbacks=[KLGuardCallback()])`, of either package's `Trainer`."""

try:
    import torch  # noqa: F401

    from kl_guard_lightning.base import PACKAGES  # noqa: F401
except ModuleNotFoundError as err:
    if err.name not in {"torch", "lightning", "pytorch_lightning"}:
        raise
    raise ModuleNotFoundError(
        f"kl_guard_lightning needs Lightning, and {err.name} is not installed. "
        f"Install it with: pip install 'kl-guard[lightning]'",
        name=err.name,
    ) from err

from kl_guard_lightning.callback import KLGuardCallback
from kl_guard_lightning.changes import RollbackContext
from kl_guard_lightning.fit import fit_with_rollback

__all__ = ["KLGuardCallback", "RollbackContext", "fit_with_rollback"]
