"""Causes in how KL is measured: reference, dropout, tokens, mask, estimator, sampler."""

from __future__ import annotations

import itertools
import math

from kl_guard.diagnosis.case import Case, Scored
from kl_guard.findings import Cause
from kl_guard.token_stats import SMALL_PLACE, Outlier

MOST = 0.5  # share of the mass at one kind of place
SHARP = 0.8  # share that leaves no doubt, also where completions are short
OFTEN = 3  # observations of which most must say so
FAR = 10.0  # how many times k3 is above k1 and k2 where the estimator is what blows up
UNLIKELY = -15.0  # log-prob of a token that is hardly ever sampled
GAP = 0.05  # nats per token between trainer and sampler; engine noise is .01 to .05


def dropout(case: Case) -> Scored | None:
    """Dropout makes the policy another model at each forward pass."""
    where = case.facts.get("dropout")
    if not where:
        return None
    wrong = case.began_unequal or case.finding.signature == "REFERENCE_MISMATCH"
    return 0.92 if wrong else 0.55, Cause(
        "dropout is on while log-probs are computed",
        f"{where}{_first_kl(case)}",
        "set every dropout of the model's configuration to 0 (in TRL: disable_dropout=True)",
        {"disable_dropout": True},
    )


def maybe_dropout(case: Case) -> Scored | None:
    """Modules that drop out are in training mode; whether they were while log-probs were computed is not known."""
    where = case.facts.get("training_dropout")
    if not where or not (case.wrong_from_the_start or case.finding.signature == "REFERENCE_MISMATCH"):
        return None
    return 0.9, Cause(
        "dropout may be on while log-probs are computed",
        f"in training mode: {where}{_first_kl(case)}",
        "compute the policy's log-probs in evaluation mode, or set every dropout of the model to 0",
    )


def other_reference(case: Case) -> Scored | None:
    """The reference has other weights than the policy started from."""
    how = case.facts.get("reference_differs")
    if not how:
        return None
    wrong = case.began_unequal or case.finding.signature == "REFERENCE_MISMATCH"
    return 0.94 if wrong else 0.4, Cause(
        "the reference is not the model that the policy started from",
        f"{how}{_first_kl(case)}",
        "load the reference from the checkpoint that the policy starts from",
    )


def adapter(case: Case) -> Scored | None:
    """With the adapter off, the model is not the one that the policy started from."""
    how = case.facts.get("adapter")
    if not how:
        return None
    wrong = case.began_unequal or case.finding.signature == "REFERENCE_MISMATCH"
    return 0.96 if wrong else 0.4, Cause(
        "the reference is the base model without the adapter that the policy started from",
        f"{how}{_first_kl(case)}",
        "merge the adapter into the base model first, or keep a copy of it as the reference's adapter",
    )


def changing_reference(case: Case) -> Scored | None:
    """The reference's parameters change, or may."""
    sums = case.known("reference_checksum")
    changes = [step for (_, a), (step, b) in itertools.pairwise(sums) if a != b]
    trained = case.facts.get("reference_trainable")
    if changes:
        evidence = (
            f"its parameters had changed by step {changes[0]}, when they were looked at again"
            if len(sums) == 2
            else f"its parameters had changed at {len(changes)} of the {len(sums) - 1} looks after the first one, to "
            f"begin with by step {changes[0]}"
        )
        more = f"; {trained}" if trained else ""
        return 0.97, Cause("the reference is changing", evidence + more, _FREEZE)
    return (0.5, Cause("the reference may be trained", str(trained), _FREEZE)) if trained else None


_FREEZE = (
    "set requires_grad to False on the reference, keep it out of the optimizer, share no parameter with the policy, "
    "and look for a callback that writes to it"
)


def unlike_scoring(case: Case) -> Scored | None:
    """Policy and reference are run differently, or scored differently in a way that is not known."""
    how = case.facts.get("unlike")
    if how:
        evidence = f"{how}{_first_kl(case)}"
        return 0.7 if case.wrong_from_the_start else 0.3, Cause(
            "policy and reference differ in how they are run", evidence, "give both the same dtype and device"
        )
    if not case.wrong_from_the_start and case.finding.signature != "REFERENCE_MISMATCH":
        return None
    first = case.finding.evidence.get("first_kl", case.first_kl)
    return 0.5, Cause(
        "policy and reference are not scored alike",
        f"KL was {first:.3g} before there was anything to learn from",
        "check, in this order: dropout is off while log-probs are computed; the reference has the weights the policy "
        "started from (with PEFT: the adapter the policy started from); same dtype, temperature and chat template",
    )


def end_of_sequence(case: Case) -> Scored | None:
    """KL sits on the last tokens of completions."""
    share = _lasting(case, "end_share")
    if share is None:
        share = _sharp_at_first(case)
    if share is None:
        return None
    special = case.finding.signature in ("REFERENCE_MISMATCH", "REF_POLICY_DRIFT_ASYMMETRY")
    if case.began_equal:
        return 0.6 if special else 0.35, Cause(
            "the policy has learnt to end its completions otherwise",
            f"{share:.0%} of the KL sits on the last token of each completion{_equal_at_first(case)}",
            "compare the lengths of completions with those at the start, and see whether the reward favours a length",
        )
    early = next((value for step, value in case.known("end_share") if step <= OFTEN), _sharp_at_first(case) or 0.0)
    wrong = case.began_unequal and early >= MOST
    if case.finding.signature == "REFERENCE_MISMATCH" and not wrong:
        return None
    worst = next((o for o in _recent(case) if o.token_id is not None), None)
    token = f"; the largest is {_named(worst)}" if worst is not None else ""
    token += _without_special(case)
    # Where nearly all of it sits there at first, other faults of the set-up do not explain it; where half of it does,
    # they may.
    return 0.98 if wrong and early >= SHARP else 0.9 if wrong or special else 0.5, Cause(
        "the end of sequence is scored differently by policy and reference",
        f"{share:.0%} of the KL sits on the last token of each completion{token}",
        "compare the end-of-sequence and padding ids of both models and of the tokenizer, and the chat template; see "
        "that the same token ends a turn for both",
    )


def particular_token(case: Case) -> Scored | None:
    """KL sits on one token id."""
    share, token_id = _lasting(case, "id_share"), case.same("id_of_share")
    if share is None or token_id is None:
        return None
    both = zip(case.history.column("id_of_share"), case.history.column("id_share"), strict=True)
    share = [of_it for other, of_it in both if other == token_id][-1]
    if share < MOST:
        return None  # what is high is the share of another one
    worst = next((o for o in _recent(case) if o.token_id == int(token_id)), None)
    token = _named(worst) if worst is not None else f"id {token_id:.0f}"
    special = case.finding.signature == "REF_POLICY_DRIFT_ASYMMETRY"
    if case.began_equal:
        return 0.55 if special else 0.35, Cause(
            "the policy has learnt to use one token otherwise",
            f"{share:.0%} of the KL sits on {token}{_equal_at_first(case)}",
            "read some completions, and see whether the reward favours this token",
        )
    return 0.85 if special else 0.45, Cause(
        "one token is scored differently by policy and reference",
        f"{share:.0%} of the KL sits on {token}{_without_special(case)}",
        "compare tokenizers and chat templates: a formatting token may be new to the reference",
    )


def narrow_place(case: Case) -> Scored | None:
    """KL sits on a narrow range of positions."""
    share = _lasting(case, "place_share")
    latest = case.outliers.latest
    if share is None or latest is None:
        return None
    narrow = [place for place in latest.places if place[1] <= SMALL_PLACE * latest.tokens]
    first, tokens, _ = max(narrow, key=lambda place: place[2], default=(0, 0, 0.0))
    where = f"{share:.0%} of it sits on positions {first} to {2 * first}, which are {tokens} of {latest.tokens} tokens"
    special = case.finding.signature == "REF_POLICY_DRIFT_ASYMMETRY"
    if case.began_equal:
        return 0.55 if special else 0.35, Cause(
            "the policy has learnt to write the same positions otherwise",
            f"{where}{_equal_at_first(case)}",
            "read how completions look there, and see whether the reward favours it",
        )
    return 0.8 if special else 0.4, Cause(
        "the same positions of each completion carry the KL",
        where,
        "compare what stands there with the chat template: a prefix may be new to the reference",
    )


def padding(case: Case) -> Scored | None:
    """Padding counts."""
    covered = case.now("padding")
    if not covered:
        return None
    return 0.99 if case.finding.signature == "PADDING_IN_MASK" else 0.96, Cause(
        "the mask lets padding through",
        f"{covered:.0f} tokens of padding count in loss and KL",
        "cut the mask behind the first end of sequence; where padding and end of sequence are one id, tell them apart "
        "by position, not by id",
    )


def estimator(case: Case) -> Scored | None:
    """k3 is far above the other estimates of the same KL."""
    k3, k1, k2 = (case.now(name) for name in ("kl_token_mean", "k1_mean", "k2_mean"))
    if k3 is None or k1 is None or k2 is None or not k3 > FAR * max(abs(k1), k2) > 0:
        return None
    return 0.65, Cause(
        "the estimator blows up, more than the policy",
        f"k3 is {k3:.3g}, k1 {k1:.3g} and k2 {k2:.3g}: k3 grows with exp of the log-ratio where the reference likes a "
        f"token more",
        "clip the log-ratio before exp (per_token_kl(..., log_ratio_clip=20)), or use k1 in the reward",
    )


def few_tokens(case: Case) -> Scored | None:
    """A few tokens carry the KL."""
    outliers = [o for o in _recent(case) if not math.isnan(o.kl)]
    alone = bool(case.finding.evidence.get("few_tokens"))
    outlying = case.finding.signature == "TOKEN_OUTLIER"
    if not (alone or outlying or (outliers and (case.now("top_share") or 0.0) >= MOST)):
        return None
    share = case.finding.evidence.get("top_share")
    known = f"{share:.0%} of it sits on a thousandth of the tokens; " if isinstance(share, float) else ""
    worst = f"the largest is {_named(outliers[0])}" if outliers else f"{known}which ones is not known"
    back = [r for r in case.outliers.ids() if r.steps >= OFTEN][:3]
    again = f"; coming back: {', '.join(f'{_name(r.worst)} in {r.steps} steps' for r in back)}" if back else ""
    score = 0.98 if alone else 0.75 if outlying else 0.35
    return score, Cause(
        "a few tokens carry the KL, not the policy at large",
        f"{worst}{again}",
        "look at these tokens in their completions; clip the log-ratio before exp, and mask what was not sampled",
    )


def unsampled(case: Case) -> Scored | None:
    """A token counts that the policy can hardly have sampled."""
    worst = next((o for o in _recent(case) if not math.isnan(o.kl)), None)
    if worst is None or not worst.policy_logprob < UNLIKELY:
        return None
    return 0.6 if case.finding.signature == "TOKEN_OUTLIER" else 0.3, Cause(
        "the mask may let tokens through that the policy did not sample",
        f"by the policy, {_name(worst)} at position {worst.position} has a log-prob of {worst.policy_logprob:.4g}, a "
        f"chance of {math.exp(worst.policy_logprob):.1g}",
        "see that the mask leaves out the prompt, tool responses and padding, and that completions are scored with the "
        "weights and the temperature they were sampled with",
    )


def few_completions(case: Case) -> Scored | None:
    """A few completions carry the KL, all of their tokens."""
    few = case.outliers.few_completions()
    if few is None:
        return None
    latest = case.outliers.latest
    rest = f"; nine tokens of ten have less than {latest.quantiles[0.9]:.3g} nats" if latest is not None else ""
    return 0.97 if case.finding.signature == "REFERENCE_MISMATCH" else 0.85, Cause(
        "a few completions are scored wrongly, the others are not",
        f"{few} carry the KL{rest}",
        "compare token ids, log-probs and mask of such a completion: they may be shifted by one, or tokenized twice. "
        "Going back cannot help",
    )


def sampler(case: Case) -> Scored | None:
    """The trainer gives samples other log-probs than the sampler did."""
    gap = case.facts.get("sampler_gap")
    if not isinstance(gap, (int, float)) or not gap > GAP:
        return None
    score = 0.8 if case.finding.signature == "KL_NEGATIVE" else 0.6
    return score, Cause(
        "trainer and sampler disagree",
        f"their log-probs of the same tokens differ by {gap:.3g} nats on average",
        "check that the sampler has the trainer's weights of this step, and its dtype; use importance correction",
    )


def other_samples(case: Case) -> Scored | None:
    """A negative KL is no KL of the policy's own samples."""
    return 0.5, Cause(
        "the samples are not from the policy that is scored",
        f"KL is {case.finding.evidence.get('kl_mean', math.nan):.3g}",
        "check that completions are scored with the weights, the temperature and the masks that they were sampled with",
    )


def clamped(case: Case) -> Scored | None:
    """The maximum sits at a ceiling."""
    return 0.5, Cause(
        "KL is clamped per token before it is logged",
        f"the ceiling is {case.finding.evidence.get('ceiling', math.nan):g}",
        "log the extreme log-ratio as well; judge this run by its mean and by the share of tokens at the ceiling",
    )


def captured_late(case: Case) -> Scored | None:
    """The reference is the resumed policy."""
    return 0.5, Cause(
        "the reference was captured after the checkpoint was loaded",
        f"KL fell from {case.finding.evidence.get('recorded_kl', math.nan):.3g} to "
        f"{case.finding.evidence.get('median_kl', math.nan):.3g} at the resume",
        "load the reference from the model that the run started from, not from the resumed policy",
    )


def nothing_moves(case: Case) -> Scored | None:
    """KL is 0 although it should not be."""
    gradient = case.finding.evidence.get("grad_norm")
    if gradient == 0:
        evidence = "the grad norm is 0 although rewards vary"
        return 0.7, Cause("no gradient reaches the policy", evidence, _TRAINABLE)
    evidence = "KL is exactly 0 while there is something to learn"
    return 0.5, Cause("the policy is compared with itself", evidence, _TRAINABLE)


_TRAINABLE = (
    "check that the policy's parameters require a gradient and are in the optimizer, that the adapter is active and "
    "not merged, and that the reference is a model of its own"
)


def _lasting(case: Case, name: str) -> float | None:
    """Return the latest of a share that is at least a half in most of the last few observations."""
    known = [value for _, value in case.known(name)][-OFTEN:]
    if not known or 2 * sum(value >= MOST for value in known) <= len(known):
        return None
    return known[-1] if known[-1] >= MOST else max(known)


def _sharp_at_first(case: Case) -> float | None:
    """Return the share on last tokens where a run has just begun and it leaves no doubt, also where ends are many."""
    latest = case.outliers.latest
    if latest is None or len(case.history) >= OFTEN or not latest.end_share >= SHARP or not latest.places:
        return None
    ends = latest.places[0][1] / latest.tokens if latest.places[0][0] == 0 else 1.0
    return latest.end_share if ends <= MOST else None


def _recent(case: Case) -> tuple[Outlier, ...]:
    """Return the outliers of the finding's step, or of the last one that has any."""
    return case.outliers.at(case.finding.step) or (case.outliers.latest.outliers if case.outliers.latest else ())


def _without_special(case: Case) -> str:
    """Say what KL is without special tokens, where that is known."""
    latest = case.outliers.latest
    known = None if latest is None else latest.kl_without_special
    return "" if known is None else f"; without special tokens KL is {known:.3g}"


def _name(outlier: Outlier) -> str:
    known = f"{outlier.text!r} (id {outlier.token_id})" if outlier.text is not None else f"id {outlier.token_id}"
    return known if outlier.token_id is not None else "a token"


def _named(outlier: Outlier) -> str:
    return (
        f"{_name(outlier)} at position {outlier.position} with {outlier.kl:.4g} nats (log-prob "
        f"{outlier.policy_logprob:.4g} by the policy, {outlier.ref_logprob:.4g} by the reference)"
    )


def _equal_at_first(case: Case) -> str:
    return f"; at step 1 both were scored alike (KL {case.first_kl:.2g})"


def _first_kl(case: Case) -> str:
    return f"; KL was {case.first_kl:.3g} at step 1" if case.began_unequal else ""
