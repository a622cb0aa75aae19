"""One signature per file: `update(observation)` returns a finding or None."""

from kl_guard.detectors.base import Detector
from kl_guard.detectors.kl_blowup import KLBlowup
from kl_guard.detectors.kl_growth import KLGrowth
from kl_guard.detectors.kl_missing import KLMissing
from kl_guard.detectors.kl_nonfinite import KLNonfinite
from kl_guard.detectors.reference_mismatch import ReferenceMismatch
from kl_guard.detectors.restored_kl import RestoredKL
from kl_guard.detectors.rise import Rise, RiseMonitor

__all__ = [
    "Detector",
    "KLBlowup",
    "KLGrowth",
    "KLMissing",
    "KLNonfinite",
    "ReferenceMismatch",
    "RestoredKL",
    "Rise",
    "RiseMonitor",
]
