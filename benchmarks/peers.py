"""Three peer tools, run live on a recorded series: one observation at a time, each as its documentation sets it up.

Every peer keeps its default thresholds. Only its alarms about the KL divergence and about non-finite numbers count;
whatever else it watches (entropy, reward, gradient spikes, ...) is left out, because the labels say nothing about it.
The peers are optional: whatever is not installed is listed by `missing_peers`.

A row maps a column (`step`, `kl`, `kl_max`, `reward`, `reward_std`, `entropy`, `grad_norm`, `learning_rate`, `loss`,
`completion_length`) to its value. None is a metric that was not logged, and NaN is one that was logged as NaN: rlprobe
drops NaN as its TRL callback does, rlwatch and rldoctor receive it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import math
import tempfile
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

PINNED = {"rlprobe": "0.1.0", "rlwatch": "0.5.1", "rldoctor": "0.2.0"}
"""The versions that these adapters were written against."""


@dataclass(frozen=True)
class Alarm:
    """The first alarms of one peer on one series; each step is that at which the peer spoke."""

    critical_step: int | None = None
    warn_step: int | None = None
    onset_step: int | None = None
    error: str | None = None


class Peer(Protocol):
    """A peer tool with its settings.

    `live` is False for a tool that only reads whole logs and is re-run here on each prefix; `every` is its number of
    steps between two looks; `counted` names the detectors whose alarms count.
    """

    name: str
    version: str
    live: bool
    every: int
    counted: tuple[str, ...]

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first critical alarm."""


@dataclass(frozen=True)
class Missing:
    """A peer that is not installed, or is installed in another version."""

    name: str
    found: str | None

    def __str__(self) -> str:
        state = "is not installed" if self.found is None else f"is installed as {self.found}"
        return f"{self.name} {PINNED[self.name]} {state}: pip install {self.name}=={PINNED[self.name]}"


def _installed(name: str) -> str | None:
    """Return the installed version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def available_peers(every: int | None = None) -> list[Peer]:
    """Return the installed peers.

    Parameters
    ----------
    every
        Steps between two diagnoses of rlprobe and rldoctor; None keeps the default of each, 25. rlwatch always looks
        at every step.
    """
    peers: list[Peer] = []
    if _installed("rlprobe"):
        peers.append(RLProbe() if every is None else RLProbe(every))
    if _installed("rlwatch"):
        peers.append(RLWatch())
    if _installed("rldoctor"):
        peers.append(RLDoctor() if every is None else RLDoctor(every))
    return peers


def missing_peers() -> list[Missing]:
    """Return the peers that are not installed in the version these adapters were written against."""
    return [Missing(name, _installed(name)) for name, version in PINNED.items() if _installed(name) != version]


def _renamed(row: Mapping[str, float | None], names: Mapping[str, str]) -> dict[str, float]:
    """Return the logged values of a row under the names a peer gives them."""
    return {name: value for column, name in names.items() if (value := row.get(column)) is not None}


def _step(row: Mapping[str, float | None], index: int) -> int:
    """Return the step of a row, or its place where it has none."""
    step = row.get("step")
    return index + 1 if step is None else int(step)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what peers print and their numeric warnings."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


class _Errors(logging.Handler):
    """Collects what a peer logs about its own failures instead of raising."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def _errors_of(logger_name: str) -> Iterator[list[str]]:
    """Divert the warnings of a logger into a list."""
    logger, handler = logging.getLogger(logger_name), _Errors()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


# --- rlprobe ----------------------------------------------------------------------------------------------------------

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
    values = _renamed(row, _RLPROBE_FIELDS)
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
        with _quiet():
            for index, row in enumerate(rows):
                step = _step(row, index)
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


# --- rlwatch ----------------------------------------------------------------------------------------------------------

_RLWATCH_FIELDS = {
    "kl": "kl_divergence",
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "loss": "loss",
}


class RLWatch:
    """rlwatch in its manual mode: `log_step` per step, which returns the alerts it sent.

    KL is critical above 4.5 and a warning above 3 standard deviations over the mean of the last 100 values, from the
    20th value on. Cooldown and the limit of 50 alerts a run stay on. It never halts by itself; its critical alerts say
    "immediately reduce learning rate" (KL) and "stop the run immediately" (loss). It is built from `RLWatchConfig()`,
    not by `attach`, so that no `rlwatch.yaml` or webhook of this machine takes part.
    """

    name = "rlwatch"
    live = True
    every = 1
    counted: tuple[str, ...] = ("kl_explosion", "loss_nan")

    def __init__(self) -> None:
        self.version = importlib.metadata.version("rlwatch")

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first critical alarm."""
        rlwatch: Any = importlib.import_module("rlwatch")
        warn_step: int | None = None
        with tempfile.TemporaryDirectory(prefix="rlwatch-") as folder, _quiet():
            config = rlwatch.RLWatchConfig(run_id="series", framework="manual")
            config.storage.log_dir = folder
            monitor = rlwatch.RLWatch(config)
            monitor.start()
            try:
                for index, row in enumerate(rows):
                    step = _step(row, index)
                    try:
                        alerts = monitor.log_step(step, **_renamed(row, _RLWATCH_FIELDS))
                    except Exception as error:  # whatever a peer raises is its result
                        return Alarm(warn_step=warn_step, error=f"step {step}: {type(error).__name__}: {error}")
                    severities = {alert.severity for alert in alerts if alert.detector in self.counted}
                    if "critical" in severities:
                        return Alarm(step, warn_step)
                    if severities and warn_step is None:
                        warn_step = step
            finally:
                monitor.stop()
        return Alarm(warn_step=warn_step)


# --- rldoctor ---------------------------------------------------------------------------------------------------------

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
        with _quiet(), _errors_of("rl-doctor") as errors:
            for index, row in enumerate(rows):
                step = _step(row, index)
                try:
                    monitor.log(_renamed(row, _RLDOCTOR_FIELDS), step=step)
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
