"""KL_NONFINITE: the numbers have left the number line."""

from __future__ import annotations

import math
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import METRICS, Observation
from kl_guard.stats import Streak


def _broken(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


class KLNonfinite(Detector):
    """Critical when KL or the gradient is NaN or inf in a way that training does not recover from.

    Any of: KL is inf or NaN together with a non-finite gradient norm or loss; KL is inf for `sustain` observations; the
    gradient norm is non-finite for `sustain` observations whatever KL says (single ones are normal with an fp16
    scaler); the gradient norm and the reward or its standard deviation are non-finite at once (then the advantages
    were, and no scaler explains it: R1-V issue 69).

    Parameters
    ----------
    config:
        `sustain` 3 is the only knob.

    Examples
    --------
    >>> detector = KLNonfinite()
    >>> detector.update(Observation(82, kl_mean=float("nan"), grad_norm=float("nan"))).severity
    <Severity.CRITICAL: 'critical'>
    """

    signature = "KL_NONFINITE"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._sustain = (config or GuardConfig()).sustain
        self._infinite_kl = Streak()
        self._broken_gradient = Streak()

    def _judge(self, observation: Observation) -> Severity | None:
        step, gradient = observation.step, _broken(observation.grad_norm)
        infinite = observation.kl_mean is not None and math.isinf(observation.kl_mean)
        lasting = [
            self._infinite_kl.update(step, infinite) >= self._sustain,
            self._broken_gradient.update(step, gradient) >= self._sustain,
        ]
        at_once = _broken(observation.kl_mean) and (gradient or _broken(observation.loss))
        no_advantage = gradient and (_broken(observation.reward) or _broken(observation.reward_std))
        return Severity.CRITICAL if at_once or no_advantage or any(lasting) else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        figures = {name: value for name in METRICS if _broken(value := getattr(observation, name))}
        began = [s.since for s in (self._infinite_kl, self._broken_gradient) if s.since is not None]
        onset = min([observation.step, *began])
        lasts = max(self._infinite_kl.length, self._broken_gradient.length)
        for_long = f" for {lasts} observations" if lasts > 1 else ""
        named = ", ".join(f"{name} is {value}" for name, value in figures.items())
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"{named or 'a non-finite value was logged'}{for_long}",
            onset_step=onset,
            departure_step=onset,
            evidence={**figures, "observations": lasts},
        )

    def _forget(self) -> None:
        self._infinite_kl.reset()
        self._broken_gradient.reset()

    def _memory(self) -> dict[str, Any]:
        return {"kl": self._infinite_kl.state_dict(), "gradient": self._broken_gradient.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._infinite_kl.load_state_dict(memory["kl"])
        self._broken_gradient.load_state_dict(memory["gradient"])
