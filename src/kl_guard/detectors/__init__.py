"""One signature per file: `update(observation)` returns a finding or None."""

from kl_guard.detectors.base import Detector
from kl_guard.detectors.beta_runaway import BetaRunaway
from kl_guard.detectors.drift_asymmetry import DriftAsymmetry
from kl_guard.detectors.entropy_collapse import EntropyCollapse
from kl_guard.detectors.kl_blowup import KLBlowup
from kl_guard.detectors.kl_frozen import KLFrozen
from kl_guard.detectors.kl_growth import KLGrowth
from kl_guard.detectors.kl_missing import KLMissing
from kl_guard.detectors.kl_negative import KLNegative
from kl_guard.detectors.kl_nonfinite import KLNonfinite
from kl_guard.detectors.kl_plateau import KLPlateau
from kl_guard.detectors.kl_saturated import KLSaturated
from kl_guard.detectors.kl_spikes import KLSpikes
from kl_guard.detectors.padding_in_mask import PaddingInMask
from kl_guard.detectors.reference_changed import ReferenceChanged
from kl_guard.detectors.reference_mismatch import ReferenceMismatch
from kl_guard.detectors.reference_reset import ReferenceReset
from kl_guard.detectors.restored_kl import RestoredKL
from kl_guard.detectors.rise import Rise, RiseMonitor
from kl_guard.detectors.token_outlier import TokenOutlier

__all__ = [
    "BetaRunaway",
    "Detector",
    "DriftAsymmetry",
    "EntropyCollapse",
    "KLBlowup",
    "KLFrozen",
    "KLGrowth",
    "KLMissing",
    "KLNegative",
    "KLNonfinite",
    "KLPlateau",
    "KLSaturated",
    "KLSpikes",
    "PaddingInMask",
    "ReferenceChanged",
    "ReferenceMismatch",
    "ReferenceReset",
    "RestoredKL",
    "Rise",
    "RiseMonitor",
    "TokenOutlier",
]
