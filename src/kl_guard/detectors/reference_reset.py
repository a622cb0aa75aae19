"""REFERENCE_RESET: after a resume the policy is compared with itself."""

from __future__ import annotations

from kl_guard.config import GuardConfig
from kl_guard.detectors.first_kls import FirstKLs
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation

LOOKS = 3  # the median of so many is compared
SHARE = 0.1
CLEARLY = 0.01  # nats per token: a smaller KL says nothing when it falls


class ReferenceReset(FirstKLs):
    """Warns when KL right after a resume is less than a tenth of what was recorded at that checkpoint.

    A reference that is captured after the checkpoint was loaded is the resumed policy itself: KL begins at 0 again, and
    what the run had moved so far does not count any more (NeMo-RL issue 2955). Silent until `expect` is called.

    Parameters
    ----------
    config:
        `kl_kind`: the least KL that counts holds for token means only.

    Examples
    --------
    >>> detector = ReferenceReset()
    >>> detector.expect(40, recorded_kl=0.2)
    >>> [detector.update(Observation(step, kl_mean=0.001)) is not None for step in range(41, 44)]
    [False, False, True]
    """

    signature = "REFERENCE_RESET"
    looks = LOOKS

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        self._least = CLEARLY if (config or GuardConfig()).token_mean else 0.0

    def expect(self, step: int, recorded_kl: float | None) -> None:
        """Judge what comes after `step`; where KL was small there is nothing to compare with."""
        super().expect(step, recorded_kl if recorded_kl is not None and recorded_kl > self._least else None)

    def _compare(self) -> Severity | None:
        return Severity.WARN if self._seen.median < SHARE * self._recorded else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"after resuming at step {self._after} KL is {self._seen.median:.4g} (median of {LOOKS}); before, it was "
            f"{self._recorded:.4g} there: the reference is not the one of before",
            onset_step=self._seen.since,
            evidence={"median_kl": self._seen.median, "recorded_kl": self._recorded, "resumed_at": self._after},
        )
