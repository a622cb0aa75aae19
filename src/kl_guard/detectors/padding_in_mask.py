"""PADDING_IN_MASK: the mask lets padding through."""

from __future__ import annotations

from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Streak


class PaddingInMask(Detector):
    """Warns when padding behind the end of completions counts as tokens, `sustain` observations in a row.

    Loss and KL then hold tokens that nobody sampled (slime issue 1370). Needs tokens, and the id of padding.

    Parameters
    ----------
    config:
        `sustain` 3 is the only knob.

    Examples
    --------
    >>> detector = PaddingInMask()
    >>> [detector.update(Observation(step, kl_mean=0.1, padding=12)) is not None for step in range(1, 4)]
    [False, False, True]
    """

    signature = "PADDING_IN_MASK"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._sustain = (config or GuardConfig()).sustain
        self._covered = Streak()

    def _judge(self, observation: Observation) -> Severity | None:
        if observation.padding is None:
            return None
        length = self._covered.update(observation.step, observation.padding > 0)
        return Severity.WARN if length >= self._sustain else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"the mask lets {observation.padding:.0f} tokens of padding through: loss and KL hold tokens that were not "
            f"sampled",
            onset_step=self._covered.since,
            evidence={"padding": observation.padding, "observations": self._covered.length},
        )

    def _forget(self) -> None:
        self._covered.reset()

    def _memory(self) -> dict[str, Any]:
        return {"covered": self._covered.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._covered.load_state_dict(memory["covered"])
