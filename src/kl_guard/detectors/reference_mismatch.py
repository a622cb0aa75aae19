"""REFERENCE_MISMATCH: policy and reference do not start equal."""

from __future__ import annotations

import math
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation

CLEARLY = 0.1  # nats per token; engine noise at a first update is .01 to .05
BLOCKING = 2.0


class ReferenceMismatch(Detector):
    """Warns when the first KL of a fresh run, where policy and reference should be equal, is above 0.1.

    `warn` for step 1 of a run, not averaged, when KL is a token mean against the reference; otherwise `info`, since
    then some KL is to be expected. `active` while KL stays within twice its first value: going back cannot help then.

    Parameters
    ----------
    config:
        `kl_kind` is the only knob.

    Examples
    --------
    >>> ReferenceMismatch().update(Observation(1, kl_mean=2.2)).severity
    <Severity.WARN: 'warn'>
    """

    signature = "REFERENCE_MISMATCH"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._token_mean = (config or GuardConfig()).token_mean
        self._begun = False
        self._first = 0.0
        self._first_step = 0
        self._severity: Severity | None = None

    def resumed(self) -> None:
        """What comes next is not the beginning of a run: nothing to judge any more, unless it is known already."""
        self._begun = True

    def _judge(self, observation: Observation) -> Severity | None:
        kl = observation.kl_mean
        if kl is None or not math.isfinite(kl):
            return None
        if not self._begun:
            self._begun = True
            self._first, self._first_step = kl, observation.step
            if kl > CLEARLY:
                exact = observation.step <= 1 and observation.window == 1 and self._token_mean
                self._severity = Severity.WARN if exact else Severity.INFO
        return self._severity if self._severity and kl <= BLOCKING * self._first else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        averaged = f", averaged over {observation.window} steps" if observation.window > 1 else ""
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"the first KL observed (step {self._first_step}{averaged}) is {self._first:.4g}; a run begins with policy "
            f"and reference equal",
            onset_step=self._first_step,
            departure_step=self._first_step,
            evidence={"first_kl": self._first, "window": observation.window},
        )

    def _forget(self) -> None:
        self._begun = False
        self._first = 0.0
        self._first_step = 0
        self._severity = None

    def _memory(self) -> dict[str, Any]:
        severity = self._severity and self._severity.value
        return {"begun": self._begun, "first": self._first, "first_step": self._first_step, "severity": severity}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._begun, self._first, self._first_step = memory["begun"], memory["first"], memory["first_step"]
        self._severity = None if memory["severity"] is None else Severity(memory["severity"])
