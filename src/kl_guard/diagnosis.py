"""Causes of a finding, in order of likelihood, from what the run has logged."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kl_guard.findings import Cause, Finding
from kl_guard.history import History

SETTINGS = frozenset({"learning_rate", "beta"})  # what a rollback changes
TINY_BETA = 1e-3
NEAR = 20  # observations before the departure in which a changed setting counts as its cause
JUMP = 1.5
OUTSTANDING = 3.0  # a jump is that many times the usual change around it
FEW = 8  # observations that make a level

Scored = tuple[float, Cause]


@dataclass(frozen=True)
class Case:
    """A finding with the run around it; settings of steps up to `since` are those of an attempt that was given up."""

    finding: Finding
    history: History
    token_mean: bool
    since: int = -1

    @property
    def departure(self) -> int:
        """Index of the observation at which KL left its regime."""
        step = self.finding.step if self.finding.departure_step is None else self.finding.departure_step
        return self.history.index(step)

    @property
    def onset(self) -> int:
        """Index of the onset."""
        step = self.finding.step if self.finding.onset_step is None else self.finding.onset_step
        return self.history.index(step)

    def at(self, name: str, index: int) -> float | None:
        """Return the last finite value of a metric at or before an index."""
        column = self.history.column(name)
        first = self.history.index(self.since + 1) if name in SETTINGS else 0
        last = min(max(index, first), len(column) - 1)
        return next((column[i] for i in range(last, first - 1, -1) if math.isfinite(column[i])), None)

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return step and value of a metric wherever it is finite."""
        pairs = zip(self.history.steps, self.history.column(name), strict=True)
        since = self.since if name in SETTINGS else -1
        return [(step, value) for step, value in pairs if math.isfinite(value) and step > since]

    def medians(self, name: str) -> tuple[float, float] | None:
        """Return a metric's median before the departure and now, where both rest on a few values."""
        column = self.history.column(name)
        before = _finite(column[max(0, self.departure - 4 * FEW) : self.departure])
        now = _finite(column[-FEW:])
        return (statistics.median(before), statistics.median(now)) if len(before) >= 3 and len(now) >= 3 else None

    def jump(self, name: str) -> tuple[float, float, int] | None:
        """Return the largest sudden change of a setting near the departure: before, after, first step with it.

        A change is sudden when it is by half at least and stands out from the changes around it, as those of a schedule
        do not.
        """
        values = self.known(name)
        first = self.history.steps[max(0, min(self.departure - NEAR, len(self.history) - 1))]
        last = self.history.steps[min(self.onset, len(self.history) - 1)]
        sizes = [_log_ratio(a[1], b[1]) for a, b in itertools.pairwise(values)]
        best: int | None = None
        for i, size in enumerate(sizes):
            if not first <= values[i + 1][0] <= last or abs(size) < math.log(JUMP):
                continue
            around = [abs(s) for k, s in enumerate(sizes[max(0, i - 4) : i + 5], max(0, i - 4)) if k != i]
            if around and abs(size) < OUTSTANDING * statistics.median(around):
                continue
            if best is None or abs(size) > abs(sizes[best]):
                best = i
        return None if best is None else (values[best][1], values[best + 1][1], values[best + 1][0])


def explain(finding: Finding, history: History, *, token_mean: bool = True, since: int = -1) -> Finding:
    """Return `finding` with its causes, each with the evidence in this run and what to try.

    A rule that fails costs its own cause only.

    Parameters
    ----------
    finding, history:
        What was found, and the run so far.
    token_mean:
        Whether KL is in nats per token.
    since:
        The step that the run was taken back to last: settings of steps up to it are not in force any more.
    """
    case = Case(finding, history, token_mean, since)
    scored: list[Scored] = []
    for rule in _RULES.get(finding.signature, ()):
        try:
            found = rule(case)
        except Exception:  # noqa: S112 - evidence that cannot be read is no evidence
            continue
        if found is not None:
            scored.append(found)
    scored.sort(key=lambda pair: -pair[0])
    return replace(finding, causes=tuple(cause for _, cause in scored))


def _finite(values: Sequence[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _log_ratio(before: float, after: float) -> float:
    least = 1e-30
    return math.log(max(after, least)) - math.log(max(before, least))


def _times(factor: float) -> str:
    return f"x{factor:.0f}" if factor >= 10 else f"x{factor:.2g}"


def _distance(steps: int) -> str:
    """Say where a step lies that is `steps` before the departure."""
    count = f"{abs(steps)} step{'s' if abs(steps) != 1 else ''}"
    return (
        "at the estimated departure"
        if steps == 0
        else f"{count} {'before' if steps > 0 else 'after'} the estimated departure"
    )


def _beta(case: Case) -> Scored | None:
    now = case.at("beta", case.onset)
    if now is None:
        return None
    before = case.at("beta", max(0, case.departure - NEAR))
    if before is not None and now * JUMP < before:
        jump = case.jump("beta")
        when = f" at step {jump[2]}" if jump else f" within {NEAR} observations before the departure"
        evidence = f"beta fell from {before:g} to {now:g}{when}"
        return 0.95, Cause("the KL penalty was weakened", evidence, f"keep beta at {before:g}")
    if now >= TINY_BETA:
        evidence = f"beta is {now:g}; its share of the loss is too small if KL still grows at the usual learning rate"
        return 0.3, Cause("the KL penalty is too weak", evidence, f"raise beta to {2 * now:g} or more")
    weak = "is 0: nothing holds the policy near the reference" if now == 0 else f"is only {now:g}"
    return 0.8, Cause("there is hardly any KL penalty", f"beta {weak}", "set beta to 0.02 to 0.1")


def _learning_rate(case: Case) -> Scored | None:
    rate = case.at("learning_rate", case.departure)
    if rate is None:
        evidence = "the learning rate was not logged; it is the most common cause"
        return 0.4, Cause("the learning rate is too high", evidence, "halve it, add warm-up, or clip gradients harder")
    jump = case.jump("learning_rate")
    if jump and jump[1] > jump[0]:
        return _raised(case, *jump)
    before = case.at("learning_rate", max(0, case.departure - NEAR))
    rising = before is not None and (case.at("learning_rate", case.onset) or 0) > JUMP * before
    warming = ", and the schedule was still raising it" if rising else ""
    norms = case.medians("grad_norm")
    grown = norms is not None and norms[1] > 2 * norms[0] > 0
    gradient = f"; grad norm went from {norms[0]:.2g} to {norms[1]:.2g}" if norms and grown else ""
    evidence = f"it was {rate:g} at the departure{warming}{gradient}"
    remedy = f"halve it (to {rate / 2:g}), add warm-up" if rate > 0 else "check the schedule"
    return 0.7 if grown or warming else 0.5, Cause("the learning rate is too high", evidence, remedy)


def _raised(case: Case, before: float, after: float, step: int) -> Scored:
    """Put a sudden rise of the learning rate into words: a new height, or the restart of a schedule."""
    departure = case.finding.step if case.finding.departure_step is None else case.finding.departure_step
    highest = max((value for s, value in case.known("learning_rate") if s < step), default=before)
    where = f"at step {step}, {_distance(departure - step)}"
    if after <= 1.1 * highest:
        evidence = f"it went back up from {before:g} to {after:g} {where}"
        remedy = f"let the schedule restart lower than {after:g}, or warm it up"
        return 0.9, Cause("the learning rate was raised again (a restart of its schedule?)", evidence, remedy)
    grown = f" ({_times(after / before)})" if before > 0 else ""
    evidence = f"it went from {before:g} to {after:g}{grown} {where}"
    remedy = f"go back to a learning rate near {highest:g}, or raise it over many more steps"
    return 0.99, Cause("the learning rate was raised", evidence, remedy)


def _reference(case: Case) -> Scored | None:
    first = next(iter(case.known("kl_mean")), None)
    if first is None or first[1] <= 0.1 or first[0] > 1 or not case.token_mean:
        return None
    return 0.75, Cause(
        "the reference is wrong",
        f"KL was {first[1]:.3g} at step {first[0]}, where policy and reference should be equal",
        "check the reference's weights, adapter state, dtype and chat template, and that dropout is off",
    )


def _reward(case: Case) -> Scored | None:
    before = _finite(case.history.column("reward")[max(0, case.departure - 4 * FEW) : case.departure])
    now = _finite(case.history.column("reward")[-FEW:])
    if len(before) < FEW or len(now) < FEW // 2:
        return None
    old, new = statistics.mean(before), statistics.mean(now)
    if not new - old > 2 * statistics.pstdev(before) > 0:
        return None
    return 0.45, Cause(
        "the reward is being exploited",
        f"reward rose from {old:.3g} to {new:.3g} while KL left its regime",
        "read some completions; bound the reward, or raise beta",
    )


def _mismatch(case: Case) -> Scored | None:
    return 0.5, Cause(
        "policy and reference are not scored alike",
        f"KL was {case.finding.evidence.get('first_kl', math.nan):.3g} before there was anything to learn from",
        "check, in this order: dropout is off while log-probs are computed; the reference has the weights the policy "
        "started from (with PEFT: the adapter the policy started from); same dtype, temperature and chat template",
    )


def _not_restored(case: Case) -> Scored | None:
    evidence = case.finding.evidence
    return 0.5, Cause(
        "going back did not bring everything back",
        f"KL is {evidence.get('median_kl', math.nan):.3g}, and was {evidence.get('recorded_kl', math.nan):.3g} there",
        "check that the sampler (vLLM, SGLang) scores and samples with the restored weights, that the reference is the "
        "one of before, and that no callback puts other values back",
    )


def _overflow(case: Case) -> Scored | None:
    largest = max(_finite(case.history.column("kl_max")), default=None)
    infinite = math.inf in case.history.column("kl_mean") or math.inf in case.history.column("kl_max")
    seen = "kl_max was not observed" if largest is None else f"the largest finite kl_max was {largest:.3g}"
    return 0.7 if infinite or (largest or 0) > 1e4 else 0.4, Cause(
        "exp of a log-ratio overflowed", seen, "clip the log-ratio before exp (20 is common) and score in float32"
    )


def _batch(case: Case) -> Scored | None:
    last = case.history[-1]
    if not any(v is not None and not math.isfinite(v) for v in (last.reward, last.reward_std)):
        return None
    return 0.8, Cause(
        "the batch has no advantages",
        f"reward is {last.reward}, its standard deviation {last.reward_std}",
        "use at least two completions per prompt, and check what the reward returns for this batch",
    )


def _bad_data(case: Case) -> Scored | None:
    return 0.2, Cause(
        "a batch breaks the loss",
        f"it began at step {case.finding.onset_step}",
        "if a run resumed from a good checkpoint fails at the same step, skip that batch",
    )


_RULES: dict[str, tuple[Callable[[Case], Scored | None], ...]] = {
    "KL_BLOWUP": (_beta, _learning_rate, _reference, _reward),
    "KL_GROWTH": (_beta, _learning_rate, _reference, _reward),
    "KL_NONFINITE": (_overflow, _learning_rate, _beta, _batch, _bad_data),
    "REFERENCE_MISMATCH": (_mismatch,),
    "RESTORED_KL_HIGH": (_not_restored,),
}
