"""Causes of a finding, in order of likelihood, from what the run has logged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from kl_guard.findings import Cause, Finding
from kl_guard.history import History

TINY_BETA = 1e-3
NEAR = 20  # observations before the departure in which a changed setting counts as its cause
JUMP = 1.5
FEW = 8  # observations that make a level

Scored = tuple[float, Cause]


def explain(finding: Finding, history: History) -> Finding:
    """Return `finding` with its causes, each with the evidence in this run and what to try."""
    rules = _RULES.get(finding.signature, ())
    scored = [scored for rule in rules if (scored := rule(finding, history)) is not None]
    scored.sort(key=lambda pair: -pair[0])
    return replace(finding, causes=tuple(cause for _, cause in scored))


def _finite(values: Sequence[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _departure(finding: Finding, history: History) -> int:
    return history.index(finding.departure_step if finding.departure_step is not None else finding.step)


def _change(finding: Finding, history: History, name: str) -> tuple[float, float, int] | None:
    """Return the largest relative change of a setting near the departure: before, after, first step with it."""
    column = history.column(name)
    departure = _departure(finding, history)
    onset = finding.step if finding.onset_step is None else finding.onset_step
    stop = history.index(onset) + 1
    best: tuple[float, float, int] | None = None
    for i in range(max(1, departure - NEAR), min(stop, len(history))):
        before, after = column[i - 1], column[i]
        if not (math.isfinite(before) and math.isfinite(after)) or before == after or before <= 0:
            continue
        size = abs(math.log(max(after, 1e-30) / before))
        if best is None or size > abs(math.log(max(best[1], 1e-30) / best[0])):
            best = before, after, history.steps[i]
    return best


def _beta(finding: Finding, history: History) -> Scored | None:
    values = _finite(history.column("beta"))
    if not values:
        return None
    change = _change(finding, history, "beta")
    if change and change[1] * JUMP < change[0]:
        before, after, step = change
        evidence = f"beta fell from {before:g} to {after:g} at step {step}"
        return 0.95, Cause("the KL penalty was weakened", evidence, f"keep beta at {before:g}")
    beta = values[-1]
    if beta >= TINY_BETA:
        share = "; its share of the loss is too small if KL still grows at the usual learning rate"
        return 0.3, Cause(
            "the KL penalty is too weak", f"beta is {beta:g}{share}", f"raise beta to {2 * beta:g} or more"
        )
    weak = "is 0: nothing holds the policy near the reference" if beta == 0 else f"is only {beta:g}"
    return 0.8, Cause("there is hardly any KL penalty", f"beta {weak}", "set beta to 0.02 to 0.1")


def _learning_rate(finding: Finding, history: History) -> Scored | None:
    change = _change(finding, history, "learning_rate")
    departure = finding.departure_step if finding.departure_step is not None else finding.step
    if change and change[1] > JUMP * change[0]:
        before, after, step = change
        distance = departure - step
        where = f"{distance} steps before" if distance > 0 else f"{-distance} steps after" if distance else "at"
        return 0.99, Cause(
            "the learning rate was raised",
            f"it went from {before:g} to {after:g} (x{after / before:.3g}) at step {step}, {where} the departure",
            f"go back to a learning rate near {before:g}, or raise it over many more steps",
        )
    values = _finite(history.column("learning_rate"))
    if not values:
        evidence = "the learning rate was not logged; it is the most common cause"
        return 0.4, Cause("the learning rate is too high", evidence, "halve it, add warm-up, or clip gradients harder")
    rate = values[min(_departure(finding, history), len(values) - 1)]
    warming = " and still rising there" if values[-1] > JUMP * values[0] else ""
    grown = _growth(finding, history, "grad_norm")
    evidence = f"it is {rate:g} at the departure{warming}" + (
        f"; grad norm rose {grown:.2g}-fold since" if grown else ""
    )
    score = 0.7 if grown or warming else 0.5
    return score, Cause("the learning rate is too high", evidence, f"halve it (to {rate / 2:g}), add warm-up")


def _growth(finding: Finding, history: History, name: str) -> float | None:
    """Return by how much a metric's median grew from before the departure to now, where it at least doubled."""
    column, departure = history.column(name), _departure(finding, history)
    before = _finite(column[max(0, departure - 4 * FEW) : departure])
    now = _finite(column[-FEW:])
    if not before or not now:
        return None
    old, new = statistics.median(before), statistics.median(now)
    return new / old if old > 0 and new > 2 * old else None


def _reference(finding: Finding, history: History) -> Scored | None:
    first = next(iter(_finite(history.column("kl_mean"))), None)
    if first is None or first <= 0.1 or history.steps[0] > 1:
        return None
    return 0.75, Cause(
        "the reference is wrong",
        f"KL was {first:.3g} at step {history.steps[0]}, where policy and reference should be equal",
        "check the reference's weights, adapter state, dtype and chat template, and that dropout is off",
    )


def _reward(finding: Finding, history: History) -> Scored | None:
    column, departure = history.column("reward"), _departure(finding, history)
    before = _finite(column[max(0, departure - 4 * FEW) : departure])
    now = _finite(column[-FEW:])
    if len(before) < FEW or len(now) < FEW // 2:
        return None
    rise = statistics.mean(now) - statistics.mean(before)
    spread = statistics.pstdev(before)
    if not rise > 2 * spread > 0:
        return None
    return 0.45, Cause(
        "the reward is being exploited",
        f"reward rose from {statistics.mean(before):.3g} to {statistics.mean(now):.3g} while KL left its regime",
        "read some completions; bound the reward, or raise beta",
    )


def _mismatch(finding: Finding, history: History) -> Scored | None:
    return 0.5, Cause(
        "policy and reference are not scored alike",
        finding.message,
        "check, in this order: dropout is off while log-probs are computed; the reference has the weights the policy "
        "started from (with PEFT: the adapter the policy started from); same dtype, temperature and chat template",
    )


def _overflow(finding: Finding, history: History) -> Scored | None:
    kl_max = _finite(history.column("kl_max"))
    largest = max(kl_max, default=0.0)
    score = 0.7 if largest > 1e4 or math.inf in history.column("kl_mean") else 0.4
    seen = f"largest kl_max before was {largest:.3g}" if kl_max else "kl_max was not observed"
    return score, Cause(
        "exp of a log-ratio overflowed", seen, "clip the log-ratio before exp (20 is common) and score in float32"
    )


def _batch(finding: Finding, history: History) -> Scored | None:
    last = history[-1] if len(history) else None
    if last is None or not any(v is not None and not math.isfinite(v) for v in (last.reward, last.reward_std)):
        return None
    return 0.8, Cause(
        "the batch has no advantages",
        f"reward is {last.reward}, its standard deviation {last.reward_std}",
        "use at least two completions per prompt, and check what the reward returns for this batch",
    )


def _bad_data(finding: Finding, history: History) -> Scored | None:
    return 0.2, Cause(
        "a batch breaks the loss",
        f"it began at step {finding.onset_step}",
        "if a run resumed from a good checkpoint fails at the same step, skip that batch",
    )


_RULES: dict[str, tuple[Callable[[Finding, History], Scored | None], ...]] = {
    "KL_BLOWUP": (_beta, _learning_rate, _reference, _reward),
    "KL_GROWTH": (_beta, _learning_rate, _reference, _reward),
    "KL_NONFINITE": (_overflow, _learning_rate, _beta, _batch, _bad_data),
    "REFERENCE_MISMATCH": (_mismatch,),
}
