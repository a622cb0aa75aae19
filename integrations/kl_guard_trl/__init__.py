"""kl-guard for TRL: `trainer = GRPOTrainer(..., callbacks=[KLGuardCallback()])`."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import trl  # noqa: F401
except ModuleNotFoundError as err:
    if err.name not in {"torch", "transformers", "trl"}:
        raise
    raise ModuleNotFoundError(
        f"kl_guard_trl needs TRL, and {err.name} is not installed. Install it with: pip install 'kl-guard[trl]'",
        name=err.name,
    ) from err

from kl_guard_trl.callback import KLGuardCallback
from kl_guard_trl.changes import RollbackContext

__all__ = ["KLGuardCallback", "RollbackContext"]
