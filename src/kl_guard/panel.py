"""The detectors of a run, asked together: what is new, what asks for action, whether a suspicion stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kl_guard.config import GuardConfig
from kl_guard.detectors import (
    BetaRunaway,
    Detector,
    DriftAsymmetry,
    EntropyCollapse,
    KLBlowup,
    KLFrozen,
    KLGrowth,
    KLMissing,
    KLNegative,
    KLNonfinite,
    KLPlateau,
    KLSaturated,
    KLSpikes,
    PaddingInMask,
    ReferenceChanged,
    ReferenceMismatch,
    ReferenceReset,
    RestoredKL,
    RiseMonitor,
    TokenOutlier,
)
from kl_guard.findings import Finding, Severity
from kl_guard.history import History
from kl_guard.memory import Return
from kl_guard.observation import Observation
from kl_guard.stats import HorizonWindow

SETTLING = 20  # observations without a suspicion after which it ends
_SUSPICIOUS = frozenset({"KL_BLOWUP", "KL_GROWTH", "KL_NONFINITE"})
_NOTHING_NEW = frozenset({"KL_GROWTH", "KL_PLATEAU"})  # once KL_BLOWUP was said


class Panel:
    """All detectors over one series.

    Parameters
    ----------
    config:
        The knobs.
    warmup:
        Observations that count as warm-up.
    on_fault:
        Called with the signature of a detector that raised; it is off from then on, the others go on.
    """

    def __init__(self, config: GuardConfig, warmup: int, on_fault: Callable[[str], None]) -> None:
        self._config = config
        self._on_fault = on_fault
        self._monitor = RiseMonitor(config, warmup)
        self._mismatch = ReferenceMismatch(config)
        self._restored = RestoredKL(config)
        self._reset = ReferenceReset(config)
        self._spikes = KLSpikes(config)
        self.detectors: list[Detector] = [
            KLBlowup(config, self._monitor),
            KLGrowth(config, self._monitor),
            KLNonfinite(config),
            KLMissing(every=1 if config.probe == "off" else config.probe_every),
            self._mismatch,
            self._restored,
            self._reset,
            ReferenceChanged(),
            TokenOutlier(),
            DriftAsymmetry(config),
            PaddingInMask(config),
            KLNegative(config),
            KLFrozen(config),
            KLSaturated(),
            KLPlateau(config, self._monitor),
            self._spikes,
            BetaRunaway(config),
            EntropyCollapse(config),
        ]
        self._quiet = SETTLING
        self._last: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[d.signature for d in self.detectors if d.active]})"

    @property
    def suspicion(self) -> bool:
        """Whether something that may become a blow-up was seen in the last 20 observations."""
        return self._quiet < SETTLING

    @property
    def spikes(self) -> int:
        """Single observations far above the rest, among the last 100."""
        return self._spikes.count

    @property
    def wrong_from_the_start(self) -> bool:
        """Whether KL is still near a first value that was too high: going back cannot help then."""
        return self._mismatch.active and self._mismatch.said is Severity.WARN

    def acts(self, finding: Finding) -> bool:
        """Whether a finding asks for a halt or a rollback."""
        early = self._config.halt_on == "warn" and finding.signature == "KL_GROWTH"
        return finding.severity is Severity.CRITICAL or early

    def judge(self, observation: Observation, *, grace: bool = False) -> list[Finding]:
        """Return what is new at this observation.

        In `grace`, what would act is held back, to be said later if it still holds; all but KL_NONFINITE.
        """
        findings = []
        for detector in list(self.detectors):
            said = detector.said
            try:
                finding = detector.update(observation)
            except Exception:
                self.detectors.remove(detector)
                self._on_fault(detector.signature)
                continue
            if finding is None:
                continue
            if grace and self.acts(finding) and finding.signature != "KL_NONFINITE":
                detector.rearm(said)
            elif finding.signature not in _NOTHING_NEW or not self._blown_up():
                findings.append(finding)
        self._note_suspicion(observation.step)
        return findings

    def restore(
        self,
        history: History,
        said: Iterable[Finding],
        *,
        mid_run: bool,
        returned: Return | None = None,
        resumed: Return | None = None,
    ) -> None:
        """Read a history again without saying anything.

        `said` are the findings of this attempt so far: they are not repeated, unless they lead to an action, since what
        they led to is over. `mid_run` says that the history does not begin with the run, `returned` to where the run
        was taken back last, `resumed` where it goes on now.
        """
        for detector in self.detectors:
            detector.reset()
            if mid_run:
                detector.resumed()
        if returned is not None:
            self._restored.expect(returned.step, returned.recorded_kl)
        if resumed is not None:
            self._reset.expect(resumed.step, resumed.recorded_kl)
        self._quiet, self._last = SETTLING, None
        recent = len(history) - SETTLING  # conditions before that cannot be felt any more
        for i, observation in enumerate(history):
            for detector in self.detectors:
                if i < recent:
                    detector.absorb(observation)
                else:
                    detector.update(observation)
            if i >= recent:
                self._note_suspicion(observation.step)
        known = [finding for finding in said if self._config.action == "warn" or not self.acts(finding)]
        for detector in self.detectors:
            detector.rearm(max((f.severity for f in known if f.signature == detector.signature), default=None))

    @property
    def companions(self) -> list[str]:
        """The signatures of other conditions that hold now."""
        return [detector.signature for detector in self.detectors if detector.active]

    def windows(self) -> Iterator[HorizonWindow]:
        """Yield the windows that KL_BLOWUP judges, as they stand: the shortest horizon first, the whole run last."""
        return self._monitor.windows()

    def _blown_up(self) -> bool:
        """Whether KL_BLOWUP was said: the early warning has nothing to add then."""
        return any(d.said is not None for d in self.detectors if d.signature == "KL_BLOWUP")

    def _note_suspicion(self, step: int) -> None:
        if any(d.active for d in self.detectors if d.signature in _SUSPICIOUS):
            self._quiet = 0
        elif step != self._last:
            self._quiet += 1
        self._last = step
