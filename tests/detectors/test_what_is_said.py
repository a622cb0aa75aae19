"""Every finding in full: the words a user reads, the steps, the figures it rests on; the same after a stop."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from kl_guard import GuardConfig, Observation
from kl_guard.detectors import (
    BetaRunaway,
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
    TokenOutlier,
)

NAN, INF = math.nan, math.inf


def rows(steps, **values):
    """The same values at each step; a list has one for each."""
    return [
        Observation(step, **{name: v[i] if isinstance(v, list) else v for name, v in values.items()})
        for i, step in enumerate(steps)
    ]


def expecting(detector, step, recorded):
    detector.expect(step, recorded)
    return detector


SAID = {
    "missing, absent": (
        KLMissing,
        rows(range(7, 9), loss=0.5),
        ("info", 8, 7, None),
        "KL is not logged for 2 observations while loss is finite (beta 0 leaves no reference model to measure "
        "against, or the metric has another name)",
        {"observations": 2, "loss": 0.5, "grad_norm": None},
    ),
    "missing, nothing else": (
        KLMissing,
        rows([1, 2], entropy=1.0),
        ("info", 2, 1, None),
        "KL is not logged for 2 observations (beta 0 leaves no reference model to measure against, or the metric "
        "has another name)",
        {"observations": 2, "loss": None, "grad_norm": None},
    ),
    "missing, NaN once": (
        KLMissing,
        rows([1, 2], kl_mean=[0.1, NAN], loss=0.5, grad_norm=2.0),
        ("info", 2, 2, None),
        "KL is NaN while loss and grad_norm are finite (a batch whose completions are all masked does this)",
        {"observations": 1, "loss": 0.5, "grad_norm": 2.0},
    ),
    "missing for long": (
        KLMissing,
        rows(range(1, 22), kl_mean=[0.1, *[NAN] * 20], grad_norm=2.0),
        ("warn", 21, 2, None),
        "KL is NaN for 20 observations while grad_norm is finite (a batch whose completions are all masked does this)"
        "; until it is back a blow-up cannot be seen",
        {"observations": 20, "loss": None, "grad_norm": 2.0},
    ),
    "negative k3": (
        lambda: KLNegative(GuardConfig(kl_kind="k3")),
        rows([7], kl_mean=-0.25),
        ("warn", 7, 7, None),
        "KL is -0.25; k3 cannot be negative: this is another quantity, or the samples are not from the policy",
        {"kl_mean": -0.25, "observations": 1, "kl_kind": "k3"},
    ),
    "negative k2": (
        lambda: KLNegative(GuardConfig(kl_kind="k2")),
        rows([7], kl_mean=-0.25),
        ("warn", 7, 7, None),
        "KL is -0.25; k2 cannot be negative: this is another quantity, or the samples are not from the policy",
        {"kl_mean": -0.25, "observations": 1, "kl_kind": "k2"},
    ),
    "negative k1": (
        lambda: KLNegative(GuardConfig(kl_kind="k1")),
        rows(range(3, 13), kl_mean=-2.0),
        ("warn", 12, 3, None),
        "KL is -2 for 10 observations; the samples are not from the policy that is scored",
        {"kl_mean": -2.0, "observations": 10, "kl_kind": "k1"},
    ),
    "one token": (
        TokenOutlier,
        rows([9], kl_mean=2.0, kl_max=300.0, top_share=0.98, kl_trimmed=0.04, log_ratio_extreme=-5.7),
        ("info", 9, 9, None),
        "a thousandth of the tokens carries 98% of the KL of 2 (without them the mean is 0.04); the largest has 300 "
        "nats",
        {"kl_mean": 2.0, "kl_max": 300.0, "kl_trimmed": 0.04, "top_share": 0.98, "log_ratio_extreme": -5.7},
    ),
    "one token again and again": (
        TokenOutlier,
        rows(range(1, 6), kl_max=5.0, top_share=0.5),
        ("warn", 5, 5, None),
        "a thousandth of the tokens carries 50% of KL; the largest has 5 nats; so it was in 5 of the "
        "last 5 observations",
        {"kl_mean": None, "kl_max": 5.0, "kl_trimmed": None, "top_share": 0.5, "log_ratio_extreme": None},
    ),
    "frozen": (
        KLFrozen,
        rows(range(1, 10), kl_mean=0.0, grad_norm=0.0, reward_std=0.25, learning_rate=1e-6),
        ("warn", 9, 4, None),
        "KL has been exactly 0 for 6 observations, grad norm 0, reward std 0.25: the policy does not move, or it is "
        "compared with itself",
        {"observations": 6, "grad_norm": 0.0, "reward_std": 0.25, "learning_rate": 1e-6},
    ),
    "frozen while rewards move": (
        KLFrozen,
        rows(range(1, 10), kl_mean=0.0, reward=[0.1, 0.2] * 4 + [0.1]),
        ("warn", 9, 4, None),
        "KL has been exactly 0 for 6 observations: the policy does not move, or it is compared with itself",
        {"observations": 6, "grad_norm": None, "reward_std": None, "learning_rate": None},
    ),
    "restored, high": (
        lambda: expecting(RestoredKL(), 40, 0.02),
        rows(range(41, 46), kl_mean=[0.1, 0.3, 0.4, 0.5, 0.1]),
        ("warn", 45, 41, 41),
        "after going back to step 40 the first 5 KLs have a median of 0.3; at that checkpoint 0.02 was recorded",
        {"median_kl": 0.3, "recorded_kl": 0.02, "returned_to": 40},
    ),
    "restored, every one": (
        lambda: expecting(RestoredKL(), 40, -0.25),
        rows(range(42, 47), kl_mean=0.8),
        ("critical", 46, 42, 42),
        "after going back to step 40 the first 5 KLs have a median of 0.8; at that checkpoint 0.25 was recorded",
        {"median_kl": 0.8, "recorded_kl": 0.25, "returned_to": 40},
    ),
    "non-finite": (
        KLNonfinite,
        rows([81, 82], kl_mean=[0.1, NAN], grad_norm=[1.0, INF], loss=0.5),
        ("critical", 82, 82, 82),
        "kl_mean is nan, grad_norm is inf",
        {"kl_mean": NAN, "grad_norm": INF, "observations": 1},
    ),
    "infinite for long": (
        KLNonfinite,
        rows(range(81, 84), kl_mean=INF),
        ("critical", 83, 81, 81),
        "kl_mean is inf for 3 observations",
        {"kl_mean": INF, "observations": 3},
    ),
    "gradients broken for long": (
        KLNonfinite,
        rows(range(81, 84), kl_mean=0.1, grad_norm=NAN),
        ("critical", 83, 81, 81),
        "grad_norm is nan for 3 observations",
        {"grad_norm": NAN, "observations": 3},
    ),
    "at the ends": (
        DriftAsymmetry,
        rows(range(1, 4), kl_mean=0.4, end_share=0.9, place_share=0.1),
        ("warn", 3, 1, None),
        "KL is 0.4, and 90% of it sits on the last tokens of completions",
        {"kl_mean": 0.4, "end_share": 0.9, "place_share": 0.1, "id_share": None, "id_of_share": None},
    ),
    "on one id, in one place": (
        DriftAsymmetry,
        rows(range(1, 5), kl_mean=[0.05, 0.4, 0.4, 0.4], place_share=0.5, id_share=0.75, id_of_share=13.0),
        ("warn", 4, 2, None),
        "KL is 0.4, and 50% of it sits in a narrow range of positions, 75% of it sits on tokens of id 13",
        {"kl_mean": 0.4, "end_share": None, "place_share": 0.5, "id_share": 0.75, "id_of_share": 13.0},
    ),
    "another reference": (
        ReferenceMismatch,
        rows([1], kl_mean=2.25),
        ("warn", 1, 1, 1),
        "the first KL observed (step 1) is 2.25; a run begins with policy and reference equal",
        {"first_kl": 2.25, "window": 1},
    ),
    "another reference, averaged": (
        ReferenceMismatch,
        rows([10], kl_mean=2.25, window=10),
        ("info", 10, 10, 10),
        "the first KL observed (step 10, averaged over 10 steps) is 2.25; a run begins with policy and reference equal",
        {"first_kl": 2.25, "window": 10},
    ),
    "reset": (
        lambda: expecting(ReferenceReset(), 40, 0.2),
        rows(range(41, 44), kl_mean=[0.001, 0.003, 0.002]),
        ("warn", 43, 41, None),
        "after resuming at step 40 KL is 0.002 (median of 3); before, it was 0.2 there: the reference is not the one "
        "of before",
        {"median_kl": 0.002, "recorded_kl": 0.2, "resumed_at": 40},
    ),
    "saturated": (
        KLSaturated,
        rows(range(1, 11), kl_mean=0.1, kl_max=[10.0] * 6 + [2.0] * 4),
        ("info", 10, None, None),
        "kl_max was 10 in 6 of the last 10 observations: it is clamped there, and the true maximum is hidden",
        {"ceiling": 10.0, "observations": 6},
    ),
    "entropy": (
        EntropyCollapse,
        rows(range(1, 10), entropy=[1.5, 1.4, 1.3, 1.4, 1.5, 1.4, 0.24, 0.2, 0.125]),
        ("warn", 9, 7, None),
        "entropy fell from 1.4 to 0.125 nats per token: the policy hardly explores any more",
        {"entropy": 0.125, "start": 1.4, "observations": 3},
    ),
    "entropy, from a low start": (
        EntropyCollapse,
        rows(range(1, 9), entropy=[0.5] * 5 + [0.049] * 3),
        ("warn", 8, 6, None),
        "entropy fell from 0.5 to 0.049 nats per token: the policy hardly explores any more",
        {"entropy": 0.049, "start": 0.5, "observations": 3},
    ),
    "the reference moves": (
        ReferenceChanged,
        rows([1, 2], reference_checksum=[0.5, 0.75]),
        ("warn", 2, 2, None),
        "the parameters of the reference are not those of before: KL is measured against something that moves",
        {"reference_checksum": 0.75},
    ),
    "padding": (
        PaddingInMask,
        rows(range(5, 8), kl_mean=0.1, padding=12.0),
        ("warn", 7, 5, None),
        "the mask lets 12 tokens of padding through: loss and KL hold tokens that were not sampled",
        {"padding": 12.0, "observations": 3},
    ),
    "one token, that was coming": (
        TokenOutlier,
        rows([7, 8, 9], kl_max=[1.0, 1.0, 9.0], top_share=[0.1, 0.1, 0.5], log_ratio_extreme=[2.0, 1.0, 4.5]),
        ("info", 9, 9, None),
        "a thousandth of the tokens carries 50% of KL; the largest has 9 nats; the extreme log-ratio has grown from 2 "
        "to 4.5 in 3 observations",
        {"kl_mean": None, "kl_max": 9.0, "kl_trimmed": None, "top_share": 0.5, "log_ratio_extreme": 4.5},
    ),
    "a spike": (
        KLSpikes,
        rows(range(11, 17), kl_mean=[0.02, 0.04, 0.03, 8.0, 0.05, 0.06]),
        ("info", 16, 14, None),
        "KL was 8 at step 14 alone, 0.03 before and 0.05 after it; spikes are counted, not acted on (1 in the last 4 "
        "observations)",
        {"kl_mean": 8.0, "median": 0.03, "spikes": 1, "observations": 4},
    ),
    "a spike behind two high ones": (
        KLSpikes,
        rows(range(11, 21), kl_mean=[0.02, 0.04, 0.03, 8.0, 9.0, 0.05, 0.06, 7.0, 0.06, 0.05]),
        ("info", 20, 18, None),
        "KL was 7 at step 18 alone, 0.05 before and 0.06 after it; spikes are counted, not acted on (1 in the last 8 "
        "observations)",
        {"kl_mean": 7.0, "median": 0.05, "spikes": 1, "observations": 8},
    ),
    "beta": (
        BetaRunaway,
        rows(range(1, 10), beta=[0.25, 0.5, 0.5, 0.75, 0.5, 4.0, 60.0, 70.0, 80.0]),
        ("warn", 9, 7, None),
        "beta, the weight of the KL penalty, is 80, and was 0.5 at the start",
        {"beta": 80.0, "start": 0.5, "observations": 3},
    ),
    "beta, without end": (
        BetaRunaway,
        rows([1, 2], beta=[0.25, INF]),
        ("warn", 2, 2, None),
        "beta, the weight of the KL penalty, is inf, and was 0.25 at the start",
        {"beta": INF, "start": 0.25, "observations": 1},
    ),
    "plateau": (
        KLPlateau,
        rows(range(1, 21), kl_mean=1.5),
        ("warn", 20, 1, None),
        "KL has been above 1 nat per token for 20 observations (now 1.5) without growing: the policy is far from the "
        "reference and stays there",
        {"kl_mean": 1.5, "observations": 20},
    ),
    "plateau of another level": (
        lambda: KLPlateau(GuardConfig(plateau_level=2.0)),
        rows(range(1, 21), kl_mean=2.5),
        ("warn", 20, 1, None),
        "KL has been above 2 nats per token for 20 observations (now 2.5) without growing: the policy is far from the "
        "reference and stays there",
        {"kl_mean": 2.5, "observations": 20},
    ),
    "the ceiling": (
        KLBlowup,
        rows(range(1, 14), kl_mean=[0.125] * 10 + [200.0] * 3),
        ("critical", 13, 11, 9),
        "kl_mean is 200 nats per token, above the hard ceiling of 100 for 3 observations",
        {"kl_mean": 200.0, "hard_ceiling": 100.0, "observations": 3},
    ),
    "the ceiling at once": (
        KLBlowup,
        rows(range(1, 4), kl_mean=INF),
        ("critical", 3, 3, 3),
        "kl_mean is inf nats per token, above the hard ceiling of 100 for 3 observations",
        {"kl_mean": INF, "hard_ceiling": 100.0, "observations": 3},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_finding_in_full(name):
    """At the last of the observations, and, for one severity, not before."""
    make, observations, (severity, step, onset, departure), message, evidence = SAID[name]
    detector = make()
    before = [detector.update(observation) for observation in observations[:-1]]
    assert all(finding is None or finding.severity < severity for finding in before)
    finding = detector.update(observations[-1])
    assert detector.active
    assert detector.said == finding.severity == severity
    assert (finding.signature, finding.step) == (detector.signature, step)
    assert (finding.onset_step, finding.departure_step) == (onset, departure)
    assert finding.message == message
    assert dict(finding.evidence) == pytest.approx(evidence, nan_ok=True)


@pytest.mark.parametrize("name", SAID)
def test_the_same_after_a_stop(name):
    """Stopped before any of the observations and restored from JSON, it says the same, and has the same state."""
    make, observations, *_ = SAID[name]
    straight = make()
    said = [straight.update(observation) for observation in observations]
    for at in range(len(observations)):
        halved = make()
        before = [halved.update(observation) for observation in observations[:at]]
        restored = make()
        restored.load_state_dict(json.loads(json.dumps(halved.state_dict())))
        assert (restored.active, restored.said) == (halved.active, halved.said)
        assert repr([*before, *map(restored.update, observations[at:])]) == repr(said)
        assert json.dumps(restored.state_dict()) == json.dumps(straight.state_dict())


@pytest.mark.parametrize("name", SAID)
def test_nothing_is_left_after_a_reset(name):
    """The state of one that was never used, and what it says then."""
    make, observations, *_ = SAID[name]
    used = make()
    for observation in observations:
        used.update(observation)
    used.reset()
    assert not used.active
    assert used.said is None
    fresh = type(used)()
    assert json.loads(json.dumps(used.state_dict())) == json.loads(json.dumps(fresh.state_dict()))


@pytest.mark.parametrize("name", [name for name in SAID if "a spike" not in name])  # said two steps later
def test_what_is_absorbed_is_remembered_and_not_said(name):
    """After a resume the past is taken in silently: what holds is active, and said when it is next judged."""
    make, observations, (severity, *_), *_ = SAID[name]
    detector = make()
    for observation in observations:
        detector.absorb(observation)
    assert detector.said is None
    assert detector.active or isinstance(detector, KLBlowup | KLPlateau | KLSaturated)
    finding = detector.update(observations[-1])
    assert finding is not None
    assert finding.severity == severity
    assert detector.update(observations[-1]) is None
    detector.rearm()
    assert detector.update(observations[-1]).severity == severity


@pytest.mark.parametrize(
    ("make", "observations"),
    [
        (KLMissing, rows([1], loss=0.5)),
        (KLMissing, rows([1, 2], kl_mean=NAN, grad_norm=NAN)),
        (KLNegative, rows([1], kl_mean=-1e-6)),
        (KLNegative, rows([1], kl_mean=0.0)),
        (lambda: KLNegative(GuardConfig(kl_kind="k1")), rows(range(1, 20), kl_mean=-1.0)),
        (lambda: KLNegative(GuardConfig(kl_kind="k1")), rows(range(1, 10), kl_mean=-2.0)),
        (TokenOutlier, rows([1], kl_mean=1.0, kl_max=4.99, top_share=0.9)),
        (TokenOutlier, rows([1], kl_mean=1.0, kl_max=50.0, top_share=0.49)),
        (KLFrozen, rows(range(1, 9), kl_mean=0.0, grad_norm=0.0)),
        (KLFrozen, rows(range(1, 30), kl_mean=0.0, grad_norm=0.0, learning_rate=0.0)),
        (KLFrozen, rows(range(1, 30), kl_mean=0.0, grad_norm=0.0, reward_std=0.0)),
        (KLFrozen, rows(range(1, 30), kl_mean=0.0, grad_norm=0.5, reward=0.5)),
        (lambda: KLFrozen(GuardConfig(rounded=True)), rows(range(1, 30), kl_mean=0.0, grad_norm=0.0)),
        (lambda: KLFrozen(GuardConfig(kl_kind="sampler")), rows(range(1, 30), kl_mean=0.0, grad_norm=0.0)),
        (lambda: KLFrozen(GuardConfig(kl_kind="old_policy")), rows(range(1, 30), kl_mean=0.0, grad_norm=0.0)),
        (lambda: expecting(RestoredKL(), 40, 0.02), rows(range(41, 60), kl_mean=0.1)),
        (lambda: expecting(RestoredKL(), 40, 0.2), rows(range(41, 60), kl_mean=0.59)),
        (lambda: expecting(RestoredKL(), 40, None), rows(range(41, 60), kl_mean=5.0)),
        (lambda: expecting(RestoredKL(), 40, 0.02), rows(range(36, 41), kl_mean=5.0)),
        (KLNonfinite, rows(range(1, 3), kl_mean=0.1, grad_norm=NAN)),
        (KLNonfinite, rows(range(1, 3), kl_mean=INF)),
        (DriftAsymmetry, rows(range(1, 9), kl_mean=0.1, end_share=0.9)),
        (DriftAsymmetry, rows(range(1, 9), kl_mean=0.4, end_share=0.49)),
        (DriftAsymmetry, rows(range(1, 3), kl_mean=0.4, end_share=0.9)),
        (DriftAsymmetry, rows(range(1, 9), kl_mean=0.4, id_share=0.9, id_of_share=[1.0, 2.0] * 4)),
        (ReferenceMismatch, rows([1, 2], kl_mean=[0.1, 5.0])),
        (ReferenceMismatch, rows([1], kl_mean=INF)),
        (lambda: expecting(ReferenceReset(), 40, 0.2), rows(range(41, 60), kl_mean=0.0201)),
        (lambda: expecting(ReferenceReset(), 40, 0.01), rows(range(41, 60), kl_mean=0.0)),
        (KLSaturated, rows(range(1, 10), kl_max=10.0)),
        (KLSaturated, rows(range(1, 11), kl_max=[10.0] * 5 + [2.0] * 5)),
        (KLSaturated, rows(range(1, 21), kl_max=0.99)),
        (EntropyCollapse, rows(range(1, 20), entropy=[1.0] * 5 + [0.2] * 14)),
        (EntropyCollapse, rows(range(1, 20), entropy=[1.4] * 5 + [0.25] * 14)),
        (EntropyCollapse, rows(range(1, 8), entropy=[1.4] * 5 + [0.2] * 2)),
        (ReferenceChanged, rows([1, 2, 2], reference_checksum=[0.5, 0.5, 0.75])),
        (ReferenceChanged, rows([1, 2, 3], reference_checksum=[0.5, None, 0.5])),
        (TokenOutlier, rows([1], kl_mean=1.0, kl_max=50.0)),
        (KLSpikes, rows(range(1, 9), kl_mean=[0.02] * 4 + [0.5] + [0.02] * 3)),
        (KLSpikes, rows(range(1, 9), kl_mean=[0.125] * 4 + [1.0] + [0.125] * 3)),
        (KLSpikes, rows(range(1, 7), kl_mean=[0.02] * 4 + [8.0, 0.02])),
        (KLSpikes, rows(range(1, 9), kl_mean=[0.02] * 4 + [8.0, 0.5, 0.02, 0.02])),
        (BetaRunaway, rows(range(1, 9), beta=[0.01] * 5 + [10.0] * 3)),
        (BetaRunaway, rows(range(1, 9), beta=[0.5] * 5 + [50.0] * 3)),
        (BetaRunaway, rows(range(1, 8), beta=[0.5] * 5 + [60.0] * 2)),
        (PaddingInMask, rows(range(1, 9), padding=[1.0, 1.0, 0.0] * 2 + [1.0, 1.0])),
        (KLPlateau, rows(range(1, 40), kl_mean=1.0)),
        (KLPlateau, rows(range(1, 20), kl_mean=1.5)),
        (KLBlowup, rows(range(1, 40), kl_mean=100.0)),
        (KLBlowup, rows(range(1, 3), kl_mean=200.0)),
    ],
)
def test_just_below(make, observations):
    """One less, one observation fewer, or not that kind of KL: silence."""
    detector = make()
    assert [detector.update(observation) for observation in observations] == [None] * len(observations)
    assert not detector.active


def test_a_reference_that_is_far_blocks_going_back_as_long_as_kl_stays_there():
    """Up to twice its first value, and never where the run was resumed."""
    detector = ReferenceMismatch()
    detector.update(Observation(1, kl_mean=0.5))
    active = []
    for step, kl in enumerate([1.0, 1.01, 0.4, None], start=2):
        detector.update(Observation(step, kl_mean=kl))
        active.append(detector.active)
    assert active == [True, False, True, False]
    resumed = ReferenceMismatch()
    resumed.resumed()
    assert resumed.update(Observation(41, kl_mean=2.0)) is None


@pytest.mark.parametrize("every", [1, 4, 15])
def test_gaps_of_a_measurement_that_is_made_now_and_then(every):
    """As long as they are expected they are none; a longer one is said, and warned of from twice its length on."""
    detector = KLMissing(every)
    told = {}
    for step in range(1, 60):
        finding = detector.update(Observation(step, loss=0.1))
        if finding:
            told[finding.severity.value] = step
    assert told == {"info": every + 1, "warn": max(20, 2 * every)}


@pytest.mark.parametrize(
    ("detector", "share", "horizon", "skip", "span"),
    [
        (KLBlowup, 1.0, 32, 0, "the last 32 observations"),
        (KLGrowth, 0.2, 32, 20, "the last 32 observations"),
        (lambda: KLGrowth(GuardConfig(horizon="run")), 0.2, None, 20, "the run (without its first 20 observations)"),
        (lambda: KLBlowup(GuardConfig(horizon="run", robust=False)), 1.0, None, 0, "the run"),
    ],
    ids=["blow-up", "growth", "growth over the run", "published rule"],
)
def test_a_rise_in_full(detector, share, horizon, skip, span):
    """The figures are those of the numbers; onset and departure are steps."""
    kl = [0.02 + 0.001 * (step % 3) for step in range(80)] + [0.02 * 1.5**k for k in range(1, 30)]
    one = detector()
    finding = next(f for step, v in enumerate(kl, start=101) if (f := one.update(Observation(step, v, 2 * v))))
    seen = finding.step - 100
    evidence = finding.evidence
    assert evidence["observations"] == seen
    assert (evidence["kl_mean"], evidence["kl_max"]) == (kl[seen - 1], 2 * kl[seen - 1])
    assert evidence["threshold"] == pytest.approx(max(8 * evidence["baseline"], 0.5 * share))
    assert evidence["horizon"] == horizon
    length = max(5, (horizon or seen - skip) // 5)
    late = kl[seen - length : seen]
    assert evidence["late_mean"] == pytest.approx(statistics.fmean(late))
    assert evidence["late_median"] == pytest.approx(statistics.median(late))
    assert evidence["trend_p"] < evidence["alpha"] <= 0.05
    start = seen - horizon if horizon else skip
    assert evidence["baseline"] == pytest.approx(statistics.median(kl[start : start + max(5, (seen - start) // 4)]))
    first = next(step for step, value in enumerate(kl, start=101) if value > evidence["threshold"])
    assert finding.onset_step == first
    assert 178 <= finding.departure_step <= 184
    assert finding.message == (
        f"kl_mean rose to {evidence['late_mean']:.4g} (mean of the last {length} observations; median "
        f"{evidence['late_median']:.4g}), above the threshold of {evidence['threshold']:.4g}, from "
        f"{evidence['baseline']:.4g} at the start of {span}, and is still rising (Mann-Kendall p = "
        f"{evidence['trend_p']:.2g})"
    )
