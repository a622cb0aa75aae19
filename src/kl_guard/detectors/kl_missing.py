"""KL_MISSING: there is nothing to judge."""

from __future__ import annotations

import math
from typing import Any

from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Streak

LASTING = 20


class KLMissing(Detector):
    """Says that KL is NaN or absent while nothing else is broken; never a reason to halt.

    `info` at first (for a value that is absent, at the second step): a batch whose completions are all masked has no
    KL (ms-swift issue 4465). `warn` when it lasts 20 observations: then the guard is blind, most often because beta is
    0 and no reference model exists.

    Parameters
    ----------
    every:
        KL is measured at one observation in so many; gaps of that length are none.

    Examples
    --------
    >>> detector = KLMissing()
    >>> detector.update(Observation(300, kl_mean=float("nan"), loss=-0.037, grad_norm=0.006)).severity
    <Severity.INFO: 'info'>
    """

    signature = "KL_MISSING"

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self._every = every
        self._missing = Streak()
        self._seen = False

    def _judge(self, observation: Observation) -> Severity | None:
        kl = observation.kl_mean
        self._seen = self._seen or (kl is not None and not math.isnan(kl))
        sound = all(v is None or math.isfinite(v) for v in (observation.loss, observation.grad_norm))
        length = self._missing.update(observation.step, (kl is None or math.isnan(kl)) and sound)
        if length < self._every or (length <= self._every and kl is None):
            return None  # a step may be told in parts: what is absent is said when the next step has come
        return Severity.WARN if length >= max(LASTING, 2 * self._every) else Severity.INFO

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        what = "is not logged" if observation.kl_mean is None else "is NaN"
        lasts = self._missing.length
        since = f" for {lasts} observations" if lasts > 1 else ""
        why = (
            "a batch whose completions are all masked does this"
            if self._seen
            else "beta 0 leaves no reference model to measure against, or the metric has another name"
        )
        others = [n for n in ("loss", "grad_norm") if getattr(observation, n) is not None]
        while_ = f"while {' and '.join(others)} {'are' if len(others) > 1 else 'is'} finite" if others else ""
        blind = "; until it is back a blow-up cannot be seen" if severity is Severity.WARN else ""
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"KL {what}{since} {while_} ({why}){blind}".replace("  ", " "),
            onset_step=self._missing.since,
            evidence={"observations": lasts, "loss": observation.loss, "grad_norm": observation.grad_norm},
        )

    def _forget(self) -> None:
        self._missing.reset()
        self._seen = False

    def _memory(self) -> dict[str, Any]:
        return {"missing": self._missing.state_dict(), "seen": self._seen}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._missing.load_state_dict(memory["missing"])
        self._seen = memory["seen"]
