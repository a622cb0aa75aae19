"""A live guard against KL blow-ups in RL fine-tuning of language models.

>>> from kl_guard import replay
>>> replay([0.02] * 40 + [0.02 * 1.6**k for k in range(20)]).decision.action
'halt'
"""

from kl_guard._version import __version__
from kl_guard.alerts import Incident
from kl_guard.config import GuardConfig
from kl_guard.findings import Cause, Checkpoint, Decision, Finding, KLGuardHalted, Severity
from kl_guard.guard import KLGuard
from kl_guard.observation import Observation
from kl_guard.replay import ReplayResult, replay

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
