"""Causes of a finding, in order of likelihood, from what the run has logged and what is known of its set-up.

Facts that rules understand, by name (text unless said otherwise): `dropout` (which modules drop out while the policy is
scored), `training_dropout` (which are in training mode, where it is not known when the policy is scored),
`reference_differs` (how the reference's parameters differ from the policy's at the start), `adapter` (why the
reference is not the model that the adapter's policy started from), `reference_trainable`, `unlike` (dtype or device of
policy and reference), `sampler_gap` (mean difference of log-probs between trainer and sampler, in nats).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kl_guard.diagnosis import measurement, numbers, settings
from kl_guard.diagnosis.case import Case, Scored
from kl_guard.findings import Finding
from kl_guard.history import History
from kl_guard.outliers import OutlierLedger

__all__ = ["explain"]

Rule = Callable[[Case], Scored | None]


def explain(
    finding: Finding,
    history: History,
    *,
    token_mean: bool = True,
    since: int = -1,
    facts: Mapping[str, Any] | None = None,
    outliers: OutlierLedger | None = None,
    companions: Sequence[str] = (),
) -> Finding:
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
    facts:
        What is known of the set-up.
    outliers:
        Which tokens have carried the KL.
    companions:
        Signatures whose conditions hold now as well.
    """
    case = Case(finding, history, token_mean, since, facts or {}, outliers or OutlierLedger())
    scored: list[Scored] = []
    for rule in _RULES.get(finding.signature, ()):
        try:
            found = rule(case)
        except Exception:  # noqa: S112 - evidence that cannot be read is no evidence
            continue
        if found is not None:
            scored.append(found)
    scored.sort(key=lambda pair: -pair[0])
    others = [name for name in companions if name != finding.signature]
    evidence = {**finding.evidence, "companions": ", ".join(others)} if others else finding.evidence
    return replace(finding, causes=tuple(cause for _, cause in scored), evidence=evidence)


_SETTINGS: tuple[Rule, ...] = (settings.beta, settings.learning_rate, settings.reward)
_REFERENCE: tuple[Rule, ...] = (
    measurement.dropout,
    measurement.maybe_dropout,
    measurement.other_reference,
    measurement.adapter,
    measurement.changing_reference,
    measurement.unlike_scoring,
)
_TOKENS: tuple[Rule, ...] = (
    measurement.padding,
    measurement.end_of_sequence,
    measurement.particular_token,
    measurement.narrow_place,
    measurement.estimator,
    measurement.few_tokens,
    measurement.few_completions,
    measurement.unsampled,
    measurement.sampler,
)
_FAR_FROM_REFERENCE = (*_SETTINGS, *_REFERENCE, *_TOKENS)
_RULES: dict[str, tuple[Rule, ...]] = {
    "KL_BLOWUP": _FAR_FROM_REFERENCE,
    "KL_GROWTH": _FAR_FROM_REFERENCE,
    "KL_PLATEAU": _FAR_FROM_REFERENCE,
    "KL_NONFINITE": (
        settings.runaway_beta,
        numbers.overflow,
        settings.learning_rate,
        settings.beta,
        numbers.masked,
        numbers.batch,
        numbers.bad_data,
        measurement.padding,
        measurement.sampler,
    ),
    "REFERENCE_MISMATCH": (*_REFERENCE, *_TOKENS),
    "REFERENCE_CHANGED": (measurement.changing_reference,),
    "REFERENCE_RESET": (measurement.captured_late,),
    "REF_POLICY_DRIFT_ASYMMETRY": _FAR_FROM_REFERENCE,
    "TOKEN_OUTLIER": (*_REFERENCE, *_TOKENS, settings.beta, settings.learning_rate),
    "PADDING_IN_MASK": (measurement.padding,),
    "KL_NEGATIVE": (measurement.other_samples, measurement.sampler, measurement.padding),
    "KL_SATURATED": (measurement.clamped,),
    "KL_SPIKES": (*_TOKENS, numbers.overflow),
    "BETA_RUNAWAY": (settings.runaway_beta,),
    "KL_FROZEN": (measurement.nothing_moves,),
    "ENTROPY_COLLAPSE": (settings.exploration, settings.learning_rate, settings.reward),
    "RESTORED_KL_HIGH": (numbers.not_restored, measurement.sampler),
}
