"""KL_NEGATIVE: an estimate of KL that no sample from the policy gives."""

from __future__ import annotations

from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Streak

ROUNDING = 1e-6  # nats per token: k3 in float32 may come out that far below 0
FAR_BELOW = -1.0  # nats: the noise of k1 stays above
LASTING = 10


class KLNegative(Detector):
    """Warns when KL is negative where it cannot be, or far below 0 for long.

    k3 and k2 are never negative: below -1e-6 is impossible. Other estimates may be (k1 averages to something positive
    only over many samples); a mean below -1 for 10 observations is no noise: the samples are not from the policy that
    is scored (TRL issue 1005).

    Parameters
    ----------
    config:
        `kl_kind` is the only knob.

    Examples
    --------
    >>> KLNegative().update(Observation(7, kl_mean=-0.3)).severity
    <Severity.WARN: 'warn'>
    """

    signature = "KL_NEGATIVE"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._kind = (config or GuardConfig()).kl_kind
        self._below = Streak()

    def _judge(self, observation: Observation) -> Severity | None:
        kl, never = observation.kl_mean, self._kind in ("k2", "k3")
        least = -ROUNDING if never else FAR_BELOW
        length = self._below.update(observation.step, kl is not None and kl < least)
        return Severity.WARN if length >= (1 if never else LASTING) else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        lasts = f" for {self._below.length} observations" if self._below.length > 1 else ""
        why = (
            f"{self._kind} cannot be negative: this is another quantity, or the samples are not from the policy"
            if self._kind in ("k2", "k3")
            else "the samples are not from the policy that is scored"
        )
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"KL is {observation.kl_mean:.4g}{lasts}; {why}",
            onset_step=self._below.since,
            evidence={"kl_mean": observation.kl_mean, "observations": self._below.length, "kl_kind": self._kind},
        )

    def _forget(self) -> None:
        self._below.reset()

    def _memory(self) -> dict[str, Any]:
        return {"below": self._below.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._below.load_state_dict(memory["below"])
