"""KL_SPIKES: single observations far above the rest, gone at the next."""

from __future__ import annotations

import math
import statistics
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Recent

LOOKS = 20  # observations whose median a spike stands out from
FEWEST = 5  # of them, where there is no absolute floor
COUNTED = 100  # observations over which spikes are counted


class KLSpikes(Detector):
    """Says, as `info`, that KL jumped for one observation and was back at the next; counts such per 100 observations.

    A spike is above `abs_floor` and above `ratio` times the median of the 20 observations before it, and the numbers
    right before and after it are not. A ratio of log-probs that leaves its range now and then does this (OpenRLHF
    issues 931 and 525), and training goes on as before: it never acts. How often tells whether it becomes worse:
    `count`.

    Parameters
    ----------
    config:
        `ratio` 8, `abs_floor` 0.5 nats per token (token means only).

    Attributes
    ----------
    count:
        Spikes among the last 100 observations.

    Examples
    --------
    >>> detector = KLSpikes()
    >>> for step, kl in enumerate([0.02] * 5 + [5e8] + [0.02] * 3, start=1):
    ...     finding = detector.update(Observation(step, kl_mean=kl))
    ...     if finding:
    ...         print(finding.step, finding.onset_step, detector.count)
    8 6 1
    """

    signature = "KL_SPIKES"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        config = config or GuardConfig()
        self._ratio = config.ratio
        self._floor = config.abs_floor if config.token_mean else 0.0
        self._level = Recent(LOOKS)
        self._marks = Recent(COUNTED)
        self._told: list[tuple[int, float]] = []  # the last two steps that had a number
        self._before = math.nan  # the number before those
        self._spike: tuple[int, float] | None = None

    @property
    def count(self) -> int:
        """Spikes among the last 100 observations."""
        return int(sum(self._marks))

    def _judge(self, observation: Observation) -> Severity | None:
        kl = observation.kl_mean
        if kl is None or math.isnan(kl):
            return None
        if self._told and self._told[-1][0] == observation.step:
            self._told[-1] = (observation.step, kl)  # more is known of it now
            return None
        self._told.append((observation.step, kl))
        if len(self._told) < 3:
            return None
        self._spike = self._settle()
        return Severity.INFO if self._spike is not None else None

    def _settle(self) -> tuple[int, float] | None:
        """Take in the step before last, now that the one after it is known for good; return it where it was a spike."""
        (step, kl), (_, after), _ = self._told
        del self._told[0]
        limit = self._limit()
        spike = max(self._floor, after) < kl and after < limit < kl and not self._before > limit
        self._before = kl
        self._marks.update(step, float(spike))
        if spike:
            return step, kl
        if math.isfinite(kl):
            self._level.update(step, kl)
        return None

    def _limit(self) -> float:
        """Return what a spike is above, inf where too little is known."""
        known = len(self._level) >= (1 if self._floor else FEWEST)
        return max(self._floor, self._ratio * statistics.median(self._level)) if known else math.inf

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        step, kl = self._spike or (observation.step, math.nan)
        level = statistics.median(self._level)
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"KL was {kl:.4g} at step {step} alone, {level:.4g} before and {self._told[0][1]:.4g} after it; spikes are "
            f"counted, not acted on ({self.count} in the last {len(self._marks)} observations)",
            onset_step=step,
            evidence={"kl_mean": kl, "median": level, "spikes": self.count, "observations": len(self._marks)},
        )

    def _forget(self) -> None:
        self._level.reset()
        self._marks.reset()
        self._told, self._before, self._spike = [], math.nan, None

    def _memory(self) -> dict[str, Any]:
        return {
            "level": self._level.state_dict(),
            "marks": self._marks.state_dict(),
            "told": [list(pair) for pair in self._told],
            "before": self._before,
            "spike": self._spike,
        }

    def _recall(self, memory: dict[str, Any]) -> None:
        self._level.load_state_dict(memory["level"])
        self._marks.load_state_dict(memory["marks"])
        self._told = [(int(step), float(kl)) for step, kl in memory["told"]]
        self._before = float(memory["before"])
        spike = memory["spike"]
        self._spike = None if spike is None else (int(spike[0]), float(spike[1]))
