"""BETA_RUNAWAY: the weight of the KL penalty leaves its range."""

from __future__ import annotations

import math
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import First, Streak

EARLY = 5  # observations whose median is the start
FACTOR = 100.0
LARGE = 10.0  # a weight up to there may be meant


class BetaRunaway(Detector):
    """Warns when beta is not finite, or `sustain` times on end above 10 and above 100 times its start.

    A controller that adapts beta to a target of KL may double it at each step, to infinity (OpenRLHF issue 1289, Ray
    issue 18492); the penalty then is all that is learnt, or the loss overflows. The start is the median of the first
    five values above 0. It does not act: what a broken beta does to gradients is KL_NONFINITE.

    Parameters
    ----------
    config:
        `sustain` 3 is the only knob.

    Examples
    --------
    >>> detector = BetaRunaway()
    >>> findings = [detector.update(Observation(step, beta=0.01 * 2.0**step)) for step in range(1, 20)]
    >>> next(f for f in findings if f).step
    12
    """

    signature = "BETA_RUNAWAY"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._sustain = (config or GuardConfig()).sustain
        self._early = First(EARLY)
        self._far = Streak()

    def _judge(self, observation: Observation) -> Severity | None:
        beta = observation.beta
        if beta is None:
            return None
        finite = math.isfinite(beta)
        if finite and beta > 0:
            self._early.update(observation.step, beta)
        far = not finite or (self._early.full and beta > max(LARGE, FACTOR * self._early.median))
        lasts = self._far.update(observation.step, far) >= self._sustain
        return Severity.WARN if lasts or not finite else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        beta, start = observation.beta, self._early.median
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"beta, the weight of the KL penalty, is {beta:.4g}, and was {start:.4g} at the start",
            onset_step=self._far.since,
            evidence={"beta": beta, "start": start, "observations": self._far.length},
        )

    def _forget(self) -> None:
        self._early.reset()
        self._far.reset()

    def _memory(self) -> dict[str, Any]:
        return {"early": self._early.state_dict(), "far": self._far.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._early.load_state_dict(memory["early"])
        self._far.load_state_dict(memory["far"])
