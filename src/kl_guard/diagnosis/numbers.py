"""Causes in the numbers and the data."""

from __future__ import annotations

import math

from kl_guard.diagnosis.case import Case, Scored, finite
from kl_guard.findings import Cause


def not_restored(case: Case) -> Scored | None:
    """A restored policy is not where it was."""
    evidence = case.finding.evidence
    return 0.5, Cause(
        "going back did not bring everything back",
        f"KL is {evidence.get('median_kl', math.nan):.3g}, and was {evidence.get('recorded_kl', math.nan):.3g} there",
        "check that the sampler (vLLM, SGLang) scores and samples with the restored weights, that the reference is the "
        "one of before, and that no callback puts other values back",
    )


def overflow(case: Case) -> Scored | None:
    """A log-ratio, after exp, leaves the type's range."""
    largest = max(finite(case.history.column("kl_max")), default=None)
    infinite = math.inf in case.history.column("kl_mean") or math.inf in case.history.column("kl_max")
    seen = "kl_max was not observed" if largest is None else f"the largest finite kl_max was {largest:.3g}"
    return 0.7 if infinite or (largest or 0) > 1e4 else 0.4, Cause(
        "exp of a log-ratio overflowed", seen, "clip the log-ratio before exp (20 is common) and score in float32"
    )


def batch(case: Case) -> Scored | None:
    """There is nothing to learn in the batch."""
    last = case.history[-1]
    if not any(v is not None and not math.isfinite(v) for v in (last.reward, last.reward_std)):
        return None
    return 0.8, Cause(
        "the batch has no advantages",
        f"reward is {last.reward}, its standard deviation {last.reward_std}",
        "use at least two completions per prompt, and check what the reward returns for this batch",
    )


def bad_data(case: Case) -> Scored | None:
    """One batch breaks the loss."""
    return 0.2, Cause(
        "a batch breaks the loss",
        f"it began at step {case.finding.onset_step}",
        "if a run resumed from a good checkpoint fails at the same step, skip that batch",
    )
