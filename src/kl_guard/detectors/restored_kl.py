"""RESTORED_KL_HIGH: after a rollback KL is not what it was at that checkpoint."""

from __future__ import annotations

from kl_guard.config import GuardConfig
from kl_guard.detectors.first_kls import FirstKLs
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation

LOOKS = 5  # observations that are judged together: engines may need two or three to recover after a resume
FACTOR = 3.0
CLEARLY = 0.1  # nats per token


class RestoredKL(FirstKLs):
    """Compares the first five KLs after a rollback with the KL that was recorded at that checkpoint.

    `warn` when their median is above max(0.1, 3 x the recorded KL); `critical` when every one of them is above
    max(`abs_floor`, 3 x the recorded KL): then going back has not brought the policy back. A spike of two or three
    observations after a restore is neither. Silent until `expect` is called.

    Parameters
    ----------
    config:
        `abs_floor` and `kl_kind`: the absolute limits hold for token means only.

    Examples
    --------
    >>> detector = RestoredKL()
    >>> detector.expect(40, recorded_kl=0.02)
    >>> findings = [detector.update(Observation(step, kl_mean=0.3)) for step in range(41, 46)]
    >>> findings[-1].severity
    <Severity.WARN: 'warn'>
    """

    signature = "RESTORED_KL_HIGH"
    looks = LOOKS

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        config = config or GuardConfig()
        self._floors = (CLEARLY, config.abs_floor) if config.token_mean else (0.0, 0.0)

    def expect(self, step: int, recorded_kl: float | None) -> None:
        """Judge what comes after `step`; without a recorded KL there is nothing to compare with."""
        super().expect(step, None if recorded_kl is None else abs(recorded_kl))

    def _compare(self) -> Severity | None:
        low, high = (max(floor, FACTOR * self._recorded) for floor in self._floors)
        if high > 0 and min(self._seen) > high:
            return Severity.CRITICAL
        return Severity.WARN if low > 0 and self._seen.median > low else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"after going back to step {self._after} the first {LOOKS} KLs have a median of {self._seen.median:.4g}; "
            f"at that checkpoint {self._recorded:.4g} was recorded",
            onset_step=self._seen.since,
            departure_step=self._seen.since,
            evidence={"median_kl": self._seen.median, "recorded_kl": self._recorded, "returned_to": self._after},
        )
