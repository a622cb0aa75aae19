"""Causes in the numbers and the data."""

from __future__ import annotations

import math

from kl_guard.diagnosis.case import Case, Scored, finite
from kl_guard.findings import Cause

FAR = 1e4  # nats of a token that leave no doubt of exp


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
    far = infinite or (largest or 0) > FAR
    if case.finding.signature == "KL_SPIKES" and largest is not None and not far:
        return 0.4, Cause(
            "a few log-ratios leave their range",
            seen,
            "see that policy and reference score the same completions in the same order, and that the mask leaves out "
            "what was not sampled; clip the log-ratio before exp (20 is common)",
        )
    return 0.7 if far else 0.4, Cause(
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


def masked(case: Case) -> Scored | None:
    """No token of the batch counts."""
    latest = case.outliers.latest
    if latest is None or case.outliers.last_step != case.finding.step or latest.tokens:
        return None
    return 0.97, Cause(
        "every completion of the batch is masked",
        "none of its tokens counts, and the mean over none is 0/0",
        "divide by at least 1 token, or leave such a batch out; see why no completion is kept (all cut off at the "
        "longest length?)",
    )


def bad_data(case: Case) -> Scored | None:
    """One batch breaks the loss."""
    began = case.history[min(case.onset, len(case.history) - 1)]
    before = case.history[case.onset - 1].kl_mean if case.onset else None
    norms = case.medians("grad_norm")
    broken = [v for v in (began.kl_mean, began.loss, began.grad_norm) if v is not None and not math.isfinite(v)]
    sound = before is not None and math.isfinite(before) and not (norms and norms[1] > 2 * norms[0] > 0)
    # An overflow shows as inf, a learning rate that is too high as gradients that grow: here nothing announced it.
    sudden = sound and began.kl_mean is not None and math.isnan(began.kl_mean) and not any(map(math.isinf, broken))
    out_of = f", out of sound numbers (KL {before:.3g} right before)" if sudden else ""
    return 0.55 if sudden else 0.2, Cause(
        "a batch breaks the loss",
        f"it began at step {case.finding.onset_step}{out_of}",
        "see whether all of its completions are masked or empty: the mean over no token is 0/0, so divide by at least "
        "1. If a run resumed from a good checkpoint fails at the same step, skip that batch",
    )
