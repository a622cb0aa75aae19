"""rlprobe, which diagnoses what was recorded so far."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import tempfile
from typing import TYPE_CHECKING, Any

from peers.base import Alarm, quiet, renamed, step_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_RLPROBE_FIELDS = {
    "kl": "kl_mean",
    "kl_max": "kl_max",
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "entropy": "entropy_mean",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "loss": "loss",
    "completion_length": "completion_len_mean",
}


def _rlprobe_metrics(row: Mapping[str, float | None]) -> dict[str, float | int]:
    """Return a row as the fields of rlprobe's `StepRecord`.

    NaN is dropped, as in `rlprobe.integrations.trl`. The counts of non-finite gradients, which that integration never
    fills, are taken from gradient norm and loss, as a user of the manual API would.
    """
    values = renamed(row, _RLPROBE_FIELDS)
    metrics: dict[str, float | int] = {name: value for name, value in values.items() if not math.isnan(value)}
    suspects = [values[name] for name in ("grad_norm", "loss") if name in values]
    metrics["nan_count"] = sum(math.isnan(value) for value in suspects)
    metrics["inf_count"] = sum(math.isinf(value) for value in suspects)
    return metrics


class RLProbe:
    """rlprobe with its auto-halt, `attach(trainer, run_dir, halt=True)`: a diagnosis every 25 steps.

    Each diagnosis reads the whole recording again. It halts on a critical finding with a confidence of at least 0.7,
    the default `HaltPolicy`. Records are kept in memory here, as `RunWatcher` keeps them; `RLProbeLive` takes the way
    through the disk. `every=1` is what `rlprobe watch`, polling every 3 seconds, does for steps slower than that.
    """

    name = "rlprobe"
    live = True
    counted: tuple[str, ...] = ("KL_BLOWUP", "GRAD_PATHOLOGY (NaN/Inf count only)", "REF_POLICY_DRIFT_ASYMMETRY")

    def __init__(self, every: int = 25) -> None:
        self.version = importlib.metadata.version("rlprobe")
        self.every = every

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first critical alarm."""
        doctor: Any = importlib.import_module("rlprobe.doctor")
        schemas: Any = importlib.import_module("rlprobe.schemas")
        manifest = schemas.RunManifest(run_id="series", created_at="", algorithm="grpo")
        wanted = {"KL_BLOWUP", "GRAD_PATHOLOGY", "REF_POLICY_DRIFT_ASYMMETRY"}
        others = {cls.id.lower(): {"enabled": False} for cls in doctor.REGISTRY if cls.id not in wanted}
        policy = doctor.HaltPolicy()
        records: list[Any] = []
        warn_step: int | None = None
        looked = 0
        with quiet():
            for index, row in enumerate(rows):
                step = step_of(row, index)
                try:
                    records.append(schemas.StepRecord(step=step, **_rlprobe_metrics(row)))
                    if step // self.every == looked:
                        continue
                    looked = step // self.every
                    found = doctor.diagnose_view(doctor.RunView(manifest, records), config=others)
                except Exception as error:  # whatever a peer raises is its result
                    return Alarm(warn_step=warn_step, error=f"step {step}: {type(error).__name__}: {error}")
                findings = [finding for finding in found if self._counts(finding)]
                halt = policy.should_halt(findings)
                if halt is not None:
                    return Alarm(step, warn_step, halt.first_step)
                if findings and warn_step is None:
                    warn_step = step
        return Alarm(warn_step=warn_step)

    @staticmethod
    def _counts(finding: Any) -> bool:
        """Tell whether a finding is about KL or non-finite gradients (GRAD_PATHOLOGY is also about spikes)."""
        if finding.signature_id != "GRAD_PATHOLOGY":
            return True
        return any(evidence.get("metric") == "nan_count+inf_count" for evidence in finding.evidence)


class RLProbeLive:
    """rlprobe's live path for measuring its cost: call `observe` per step and `close` at the end.

    With `disk`, it does what the shipped TRL callback does in the training process: `Recorder.log_step`, and every
    `every` steps `flush` and `diagnose` with the whole catalogue, which reads the recording back from disk. Without,
    records stay in memory and only the detectors run, a lower bound. Either way a diagnosis goes over the whole
    series, not over a window, so that it costs more the longer the run.
    """

    def __init__(self, every: int = 25, *, disk: bool = True) -> None:
        self._doctor: Any = importlib.import_module("rlprobe.doctor")
        self._schemas: Any = importlib.import_module("rlprobe.schemas")
        self._policy = self._doctor.HaltPolicy()
        self._every = every
        self._records: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._recorder: Any = None
        if disk:
            self._folder = tempfile.TemporaryDirectory(prefix="rlprobe-")
            recorder: Any = importlib.import_module("rlprobe.recorder")
            self._recorder = recorder.Recorder(
                self._folder.name, algorithm="grpo", capture_env=False, install_handlers=False
            )
        else:
            self._manifest = self._schemas.RunManifest(run_id="series", created_at="", algorithm="grpo")

    def observe(self, step: int, kl: float | None, **columns: float | None) -> str | None:
        """Log one step; return the signature that would halt the run, if any."""
        metrics = _rlprobe_metrics({"kl": kl, **columns})
        if self._recorder is None:
            self._records.append(self._schemas.StepRecord(step=step, **metrics))
        else:
            self._recorder.log_step(step, **metrics)
        if step == 0 or step % self._every:
            return None
        if self._recorder is None:
            findings = self._doctor.diagnose_view(self._doctor.RunView(self._manifest, self._records))
        else:
            self._recorder.flush(timeout=5)
            findings = self._doctor.diagnose(self._recorder.run_dir)
        halt = self._policy.should_halt(findings)
        return None if halt is None else str(halt.signature_id)

    def close(self) -> None:
        """Stop the writer and delete its files."""
        if self._recorder is not None:
            self._recorder.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> RLProbeLive:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def rlprobe_live(every: int = 25, *, disk: bool = True) -> RLProbeLive:
    """Return rlprobe's live path for a cost benchmark."""
    return RLProbeLive(every, disk=disk)
