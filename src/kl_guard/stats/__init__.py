"""Exact incremental statistics over a growing series of numbers.

Nothing here knows of KL, of training or of files. Each statistic states its cost and equals the plain batch
computation on the same numbers.
"""

from kl_guard.stats.exact_sum import ExactSum
from kl_guard.stats.first import First
from kl_guard.stats.hinge import Hinge, fit_hinge
from kl_guard.stats.horizon import HorizonWindow, trailing_horizons
from kl_guard.stats.mann_kendall import SlidingMannKendall, TrendTest
from kl_guard.stats.noise import log_noise
from kl_guard.stats.recent import Recent
from kl_guard.stats.record import RunningRecord
from kl_guard.stats.series import Series
from kl_guard.stats.streak import Streak
from kl_guard.stats.windows import SortedWindow, SumWindow

__all__ = [
    "ExactSum",
    "First",
    "Hinge",
    "HorizonWindow",
    "Recent",
    "RunningRecord",
    "Series",
    "SlidingMannKendall",
    "SortedWindow",
    "Streak",
    "SumWindow",
    "TrendTest",
    "fit_hinge",
    "log_noise",
    "trailing_horizons",
]
