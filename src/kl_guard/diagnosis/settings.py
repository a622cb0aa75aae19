"""Causes in what the user has set: beta, learning rate, reward, sampling."""

from __future__ import annotations

import math
import statistics

from kl_guard.detectors.beta_runaway import EARLY, FACTOR, LARGE
from kl_guard.diagnosis.case import FEW, JUMP, NEAR, TINY_BETA, Case, Scored, distance, finite, times
from kl_guard.findings import Cause


def beta(case: Case) -> Scored | None:
    """The KL penalty is weak, or was weakened."""
    now = case.at("beta", case.onset)
    if now is None:
        return None
    before = case.at("beta", max(0, case.departure - NEAR))
    if before is not None and now * JUMP < before:
        jump = case.jump("beta")
        when = f" at step {jump[2]}" if jump else f" within {NEAR} observations before the departure"
        evidence = f"beta fell from {before:g} to {now:g}{when}"
        return 0.95, Cause(
            "the KL penalty was weakened", evidence, f"keep beta at {before:g}", {"beta": rounded(before)}
        )
    if _lost(case, now):
        return None
    if now >= TINY_BETA:
        evidence = f"beta is {now:g}{_share(case, now)}; too little if KL still grows at the usual learning rate"
        remedy = f"raise beta to {2 * now:g} or more"
        return 0.3, Cause("the KL penalty is too weak", evidence, remedy, {"beta": rounded(2 * now)})
    weak = "is 0: nothing holds the policy near the reference" if now == 0 else f"is only {now:g}"
    evidence = f"beta {weak}{_share(case, now)}"
    return 0.8, Cause("there is hardly any KL penalty", evidence, "set beta to 0.02 to 0.1", {"beta": 0.04})


def runaway_beta(case: Case) -> Scored | None:
    """Something that adapts beta has lost hold of it."""
    now = case.history[-1].beta
    if now is None or not (_lost(case, now) or case.finding.signature == "BETA_RUNAWAY"):
        return None
    first = next((beta for _, beta in case.known("beta")), None)
    start = f", and was {first:g} at first" if first is not None else ""
    return 0.9, Cause(
        "what adapts beta has lost hold of it",
        f"beta is {now:g}{start}",
        "bound the coefficient and how much it changes in a step, measure the KL that it follows as its target is "
        "meant (per token or per sequence), or keep beta fixed",
    )


def _lost(case: Case, now: float) -> bool:
    """Whether beta has left its range, as BETA_RUNAWAY has it."""
    early = [beta for _, beta in case.known("beta") if beta > 0][:EARLY]
    return not math.isfinite(now) or (bool(early) and now > max(LARGE, FACTOR * statistics.median(early)))


def _share(case: Case, weight: float) -> str:
    """Say how much of the loss the penalty is, where both are known."""
    kl, loss = case.now("kl_mean"), case.now("loss")
    if kl is None or not loss or not weight:
        return ""
    return f" (beta x KL is {weight * kl:.2g}, the loss {loss:.2g})"


def learning_rate(case: Case) -> Scored | None:
    """The learning rate is too high, or was raised."""
    rate = case.at("learning_rate", case.departure)
    if rate is None:
        evidence = "the learning rate was not logged; it is the most common cause"
        remedy = "halve it, add warm-up, or clip gradients harder"
        return 0.4, Cause("the learning rate is too high", evidence, remedy, {"max_grad_norm": 0.2, **_WARM_UP})
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
    settings = {"learning_rate": rounded(rate / 2), **_WARM_UP} if rate > 0 else {}
    return 0.7 if grown or warming else 0.5, Cause("the learning rate is too high", evidence, remedy, settings)


_WARM_UP = {"warmup_steps": 20}


def _raised(case: Case, before: float, after: float, step: int) -> Scored:
    """Put a sudden rise of the learning rate into words: a new height, or the restart of a schedule."""
    departure = case.finding.step if case.finding.departure_step is None else case.finding.departure_step
    highest = max((value for s, value in case.known("learning_rate") if s < step), default=before)
    where = f"at step {step}, {distance(departure - step)}"
    if after <= 1.1 * highest:
        evidence = f"it went back up from {before:g} to {after:g} {where}"
        remedy = f"let the schedule restart lower than {after:g}, or warm it up"
        settings = {"learning_rate": rounded(after / 2), **_WARM_UP}
        return 0.9, Cause("the learning rate was raised again (a restart of its schedule?)", evidence, remedy, settings)
    grown = f" ({times(after / before)})" if before > 0 else ""
    evidence = f"it went from {before:g} to {after:g}{grown} {where}"
    remedy = f"go back to a learning rate near {highest:g}, or raise it over many more steps"
    settings = {"learning_rate": rounded(highest)} if highest > 0 else {}
    return 0.99, Cause("the learning rate was raised", evidence, remedy, settings)


def rounded(value: float) -> float:
    """Return a value to set, without the digits that arithmetic leaves."""
    return float(f"{value:.6g}")


def reward(case: Case) -> Scored | None:
    """The reward rises while KL leaves its regime."""
    before = finite(case.history.column("reward")[max(0, case.departure - 4 * FEW) : case.departure])
    now = finite(case.history.column("reward")[-FEW:])
    if len(before) < FEW or len(now) < FEW // 2:
        return None
    old, new = statistics.mean(before), statistics.mean(now)
    if not new - old > 2 * statistics.pstdev(before) > 0:
        return None
    weight = case.now("beta")
    return 0.45, Cause(
        "the reward is being exploited",
        f"reward rose from {old:.3g} to {new:.3g} while KL left its regime",
        "read some completions; bound the reward, or raise beta",
        {"beta": rounded(2 * weight)} if weight else {},
    )


def exploration(case: Case) -> Scored | None:
    """Entropy is gone."""
    evidence = case.finding.evidence
    spread = case.medians("reward_std")
    equal = f"; the reward's spread went from {spread[0]:.3g} to {spread[1]:.3g}" if spread else ""
    return 0.8, Cause(
        "the policy has become deterministic",
        f"entropy is {evidence.get('entropy', 0):.3g} nats per token, and was {evidence.get('start', 0):.3g}{equal}",
        "go back to before the fall with a lower learning rate; raise the sampling temperature, add an entropy bonus, "
        "or use a reward that more than one completion can earn",
    )
