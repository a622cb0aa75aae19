"""TOKEN_OUTLIER: a step whose KL is that of a few tokens."""

from __future__ import annotations

from typing import Any

from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Recent

SHARE = 0.5  # of the mass, on a thousandth of the tokens
LEAST = 5.0  # nats: below it no token stands out, however little KL there is besides
LOOKS = 20
PERSISTENT = 5
GROWN = 2.0  # times the extreme log-ratio of the first of the steps looked at


class TokenOutlier(Detector):
    """Says that a thousandth of the tokens (at least one) carries half of a step's KL, the largest 5 nats or more.

    `info` for a step, `warn` when 5 of the last 20 were such. A mean KL of 1.6 million was that of one token in 4,300
    (torchforge issue 664): such a mean says nothing about the policy at large. Needs tokens, not only scalars.

    Examples
    --------
    >>> TokenOutlier().update(Observation(9, kl_mean=2.0, kl_max=300.0, top_share=0.98)).severity
    <Severity.INFO: 'info'>
    """

    signature = "TOKEN_OUTLIER"

    def __init__(self) -> None:
        super().__init__()
        self._steps = Recent(LOOKS)
        self._extremes = Recent(LOOKS)

    def _judge(self, observation: Observation) -> Severity | None:
        share, largest = observation.top_share, observation.kl_max
        if observation.log_ratio_extreme is not None:
            self._extremes.update(observation.step, observation.log_ratio_extreme)
        if share is None or largest is None:
            return None
        outlying = share >= SHARE and largest >= LEAST
        self._steps.update(observation.step, float(outlying))
        if not outlying:
            return None
        return Severity.WARN if sum(self._steps) >= PERSISTENT else Severity.INFO

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        often = f"; so it was in {sum(self._steps):.0f} of the last {len(self._steps)} observations"
        trimmed = f" (without them the mean is {observation.kl_trimmed:.4g})" if observation.kl_trimmed else ""
        mean = "KL" if observation.kl_mean is None else f"the KL of {observation.kl_mean:.4g}"
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"a thousandth of the tokens carries {observation.top_share:.0%} of {mean}{trimmed}; the largest has "
            f"{observation.kl_max:.4g} nats{often if severity is Severity.WARN else ''}{self._growth()}",
            onset_step=observation.step,
            evidence={
                "kl_mean": observation.kl_mean,
                "kl_max": observation.kl_max,
                "kl_trimmed": observation.kl_trimmed,
                "top_share": observation.top_share,
                "log_ratio_extreme": observation.log_ratio_extreme,
            },
        )

    def _growth(self) -> str:
        """Say how the extreme log-ratio has grown, where it has: then the spike was coming."""
        known = list(self._extremes)
        largest = max(known, default=0.0)
        if not known or not largest > GROWN * known[0] > 0:
            return ""
        span = known.index(largest) + 1
        return f"; the extreme log-ratio has grown from {known[0]:.3g} to {largest:.3g} in {span} observations"

    def _forget(self) -> None:
        self._steps.reset()
        self._extremes.reset()

    def _memory(self) -> dict[str, Any]:
        return {"steps": self._steps.state_dict(), "extremes": self._extremes.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._steps.load_state_dict(memory["steps"])
        self._extremes.load_state_dict(memory["extremes"])
