"""rldoctor, which diagnoses the whole history from time to time."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any, ClassVar

from peers.base import Alarm, errors_of, quiet, renamed, step_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RLDOCTOR_FIELDS = {
    "kl": "kl",
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "loss": "loss",
    "completion_length": "completions/mean_length",
}


class RLDoctor:
    """rldoctor with its `LiveMonitor` and TRL's metric names: a diagnosis every 25 records, from the 60th on.

    Each diagnosis goes over the whole history. Critical is what `halt_on=Severity.CRITICAL` stops at and what fails a
    CI run by default; KL is critical if its recent median is at least 2 while eval score or reward does not rise. The
    `kl_drift` warning that KL stays near zero is not an alarm here. Only the counted detectors are run; each finds the
    same with and without the others.
    """

    name = "rldoctor"
    live = True
    counted: tuple[str, ...] = ("kl_drift", "gradient_pathology (non-finite only)")
    _pinned_kl: ClassVar[float] = 1e-4

    def __init__(self, every: int = 25) -> None:
        self.version = importlib.metadata.version("rldoctor")
        self.every = every

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first critical alarm."""
        live: Any = importlib.import_module("rl_doctor.live")
        monitor = live.LiveMonitor(
            config={"algorithm": "grpo"},
            check_every=self.every,
            on_finding=lambda _: None,
            only=("kl_drift", "gradient_pathology"),
        )
        seen: Any = None
        warn_step: int | None = None
        with quiet(), errors_of("rl-doctor") as errors:
            for index, row in enumerate(rows):
                step = step_of(row, index)
                try:
                    monitor.log(renamed(row, _RLDOCTOR_FIELDS), step=step)
                except Exception as error:  # whatever a peer raises is its result
                    errors.append(f"{type(error).__name__}: {error}")
                if not errors and monitor.latest is seen:
                    continue
                seen = monitor.latest
                findings = [] if seen is None else seen.findings
                errors += [finding.summary for finding in findings if finding.summary.startswith("detector raised")]
                if errors:  # the monitor swallows its exceptions, and so does each diagnosis
                    return Alarm(warn_step=warn_step, error=f"step {step}: {errors[0]}")
                found = [finding for finding in findings if self._counts(finding)]
                critical = [finding for finding in found if finding.severity.name == "CRITICAL"]
                if critical:
                    return Alarm(step, warn_step, self._onset(critical, seen.run))
                if warn_step is None and any(finding.severity.name == "WARNING" for finding in found):
                    warn_step = step
        return Alarm(warn_step=warn_step)

    def _counts(self, finding: Any) -> bool:
        """Tell whether a finding is about high KL or non-finite gradients."""
        if finding.detector == "kl_drift":
            return bool(finding.metrics.get("kl_max", 0.0) > self._pinned_kl)
        return bool(finding.metrics.get("n_nonfinite", 0) > 0)

    @staticmethod
    def _onset(critical: Sequence[Any], run: Any) -> int | None:
        """Return the first non-finite step; for KL the tool states none."""
        if any(finding.detector == "kl_drift" for finding in critical):
            return None
        return int(min(run.nonfinite_steps["grad_norm"]))
