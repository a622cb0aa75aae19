"""A live guard against KL blow-ups in RL fine-tuning of language models.

>>> from kl_guard import replay
>>> replay([0.02] * 40 + [0.02 * 1.6**k for k in range(20)]).decision.action
'halt'
"""

from typing import TYPE_CHECKING, Any

from kl_guard._version import __version__

if TYPE_CHECKING:
    from kl_guard.alerts import Incident
    from kl_guard.config import GuardConfig
    from kl_guard.findings import Cause, Checkpoint, Decision, Finding, KLGuardHalted, Severity
    from kl_guard.guard import KLGuard
    from kl_guard.observation import Observation
    from kl_guard.replaying import ReplayResult, replay

__all__ = [
    "Cause",
    "Checkpoint",
    "Decision",
    "Finding",
    "GuardConfig",
    "Incident",
    "KLGuard",
    "KLGuardHalted",
    "Observation",
    "ReplayResult",
    "Severity",
    "__version__",
    "replay",
]

if not TYPE_CHECKING:  # a name is imported when it is first used, so that the command's help needs no numpy
    _HOMES = {
        "GuardConfig": "config",
        "Incident": "alerts",
        **dict.fromkeys(("Cause", "Checkpoint", "Decision", "Finding", "KLGuardHalted", "Severity"), "findings"),
        "KLGuard": "guard",
        "Observation": "observation",
        **dict.fromkeys(("ReplayResult", "replay"), "replaying"),
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
