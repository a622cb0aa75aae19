"""KL_BLOWUP: the policy is leaving the reference, super-linearly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.detectors.rise import Rise, RiseMonitor
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Streak


class KLBlowup(Detector):
    """Critical when KL is far above its own beginning and still rising, or above a hard ceiling.

    The rule is that of `RiseMonitor` with `ratio` and `abs_floor`; besides it, `kl_mean` above `hard_ceiling` for
    `sustain` observations is critical from the first step on (token means only). Where tokens are observed and a few
    of them explain it alone (see `RiseMonitor.few_tokens`), it is a warning: the policy at large has not moved.

    Parameters
    ----------
    config:
        The knobs: `ratio` 8, `abs_floor` 0.5 nats per token, `sustain` 3, `alpha` 0.05, `min_observations` 12,
        `hard_ceiling` 100 nats per token, and those of the warm-up.
    monitor:
        The series and its windows, shared with `KLGrowth`; one of its own where None.

    Examples
    --------
    >>> detector = KLBlowup()
    >>> for step in range(1, 60):
    ...     kl = 0.02 if step < 40 else 0.02 * 1.6 ** (step - 40)
    ...     finding = detector.update(Observation(step, kl_mean=kl))
    ...     if finding:
    ...         print(finding.signature, finding.step, finding.onset_step, finding.departure_step)
    KL_BLOWUP 51 49 40
    """

    signature = "KL_BLOWUP"

    def __init__(self, config: GuardConfig | None = None, monitor: RiseMonitor | None = None) -> None:
        super().__init__()
        self._config = config or GuardConfig()
        self.monitor = RiseMonitor(self._config) if monitor is None else monitor
        self._ceiling = Streak()
        self._rise: Rise | None = None
        self._few_tokens = False

    def absorb(self, observation: Observation) -> None:
        """Take in an observation of the past: no rule is evaluated."""
        self.monitor.push(observation)
        self._over(observation)

    def _over(self, observation: Observation) -> bool:
        kl = observation.kl_mean
        over = self._config.token_mean and kl is not None and kl > self._config.hard_ceiling
        return self._ceiling.update(observation.step, over) >= self._config.sustain

    def _judge(self, observation: Observation) -> Severity | None:
        self.monitor.push(observation)
        self._rise = rise = self.monitor.critical()
        over = self._over(observation)
        if rise is None and not over:
            return None
        self._few_tokens = (rise is None or self._few_make(rise)) and (not over or self._few_make(None))
        return Severity.WARN if self._few_tokens else Severity.CRITICAL

    def _few_make(self, rise: Rise | None) -> bool:
        """Whether a few tokens alone make a rise, or what is above the ceiling."""
        length = len(self.monitor)
        if rise is None:
            onset = max(0, length - self._ceiling.length)
            return self.monitor.few_tokens(0, onset, self._config.hard_ceiling, 0, onset)
        second_half = rise.start + (length - rise.start) // 2
        onset = self.monitor.onset(rise)
        return self.monitor.few_tokens(rise.start, rise.late_start, rise.threshold, second_half, onset)

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        finding = self._of_rise(observation, severity)
        if not self._few_tokens:
            return finding
        evidence = {**finding.evidence, "kl_trimmed": observation.kl_trimmed, "few_tokens": True}
        text = f"{finding.message}; but a few tokens alone make it: without them KL is {observation.kl_trimmed:.4g}"
        return replace(finding, message=text, evidence=evidence)

    def _of_rise(self, observation: Observation, severity: Severity) -> Finding:
        if self._rise is not None:
            return describe_rise(self.signature, severity, observation, self.monitor, self._rise)
        onset = self.monitor.position(observation.step if self._ceiling.since is None else self._ceiling.since)
        onset = min(onset, len(self.monitor) - 1)
        steps, ceiling = self.monitor.steps, self._config.hard_ceiling
        onset_step = steps[onset] if steps else observation.step  # no finite number so far: nothing to fit
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"kl_mean is {observation.kl_mean:.4g} nats per token, above the hard ceiling of {ceiling:g} for "
            f"{self._ceiling.length} observations",
            onset_step=onset_step,
            departure_step=steps[self.monitor.departure(onset)] if steps else onset_step,
            evidence={"kl_mean": observation.kl_mean, "hard_ceiling": ceiling, "observations": self._ceiling.length},
        )

    def _forget(self) -> None:
        self.monitor.reset()
        self._ceiling.reset()
        self._rise, self._few_tokens = None, False

    def _memory(self) -> dict[str, Any]:
        return {"monitor": self.monitor.state_dict(), "ceiling": self._ceiling.state_dict()}

    def _recall(self, memory: dict[str, Any]) -> None:
        self.monitor.load_state_dict(memory["monitor"])
        self._ceiling.load_state_dict(memory["ceiling"])
        self._rise = self.monitor.critical()


def describe_rise(
    signature: str, severity: Severity, observation: Observation, monitor: RiseMonitor, rise: Rise
) -> Finding:
    """Put a rise into a finding: figures, onset and departure."""
    onset = monitor.onset(rise)
    departure = monitor.departure(onset, rise.horizon)
    span = f"the last {rise.horizon} observations"
    if rise.horizon is None:
        span = "the run" if rise.start == 0 else f"the run (without its first {rise.start} observations)"
    return Finding(
        signature,
        severity,
        observation.step,
        f"kl_mean rose to {rise.late_mean:.4g} (mean of the last {len(monitor) - rise.late_start} observations; "
        f"median {rise.late_median:.4g}), above the threshold of {rise.threshold:.4g}, from {rise.baseline:.4g} at the "
        f"start of {span}, and is still rising (Mann-Kendall p = {rise.p:.2g})",
        onset_step=monitor.steps[onset],
        departure_step=monitor.steps[departure],
        evidence={
            "kl_mean": observation.kl_mean,
            "kl_max": observation.kl_max,
            "baseline": rise.baseline,
            "threshold": rise.threshold,
            "late_mean": rise.late_mean,
            "late_median": rise.late_median,
            "trend_p": rise.p,
            "alpha": rise.alpha,
            "horizon": rise.horizon,
            "observations": len(monitor),
        },
    )
