"""Signatures that never act: each with the cases reported from the field, and none mistaken for another."""

from __future__ import annotations

import json
import math

import pytest

from kl_guard import GuardConfig, KLGuard, Observation
from kl_guard.detectors import (
    DriftAsymmetry,
    EntropyCollapse,
    KLBlowup,
    KLFrozen,
    KLMissing,
    KLNegative,
    KLPlateau,
    KLSaturated,
    KLSpikes,
    PaddingInMask,
    ReferenceChanged,
    ReferenceReset,
    TokenOutlier,
)

CONCENTRATED = {"kl_mean": 2.0, "kl_max": 300.0, "top_share": 0.97, "kl_trimmed": 0.01}
PLAIN = {"kl_mean": 0.05, "kl_max": 1.2, "top_share": 0.04, "kl_trimmed": 0.04}


def said(detector, rows, first=1):
    """Step and severity of each finding over rows."""
    findings = [detector.update(Observation(step, **row)) for step, row in enumerate(rows, start=first)]
    return [(f.step, f.severity.value) for f in findings if f]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("k3", [0.1, -1e-7, -1e-3], [(3, "warn")]),
        ("k2", [-0.5], [(1, "warn")]),
        ("k1", [-0.3, 0.2, -0.3] * 20, []),  # TRL 1005: noise
        ("k1", [-1.5] * 9 + [-0.2], []),
        ("k1", [-1.5, -2.44, -5.27, -233.5] * 3, [(10, "warn")]),  # TRL 925, 1161; LLaMA-Factory 664
    ],
)
def test_kl_negative(kind, values, expected):
    """k3 below 0 is impossible; k1 may be a little, not for long."""
    assert said(KLNegative(GuardConfig(kl_kind=kind)), [{"kl_mean": v} for v in values]) == expected


FROZEN = {"kl_mean": 0.0, "grad_norm": 0.0, "reward_std": 0.3}


@pytest.mark.parametrize(
    ("row", "config", "fires"),
    [
        (FROZEN, {}, True),  # ms-swift 5571, 5890, 7229; lmm-r1 8
        ({**FROZEN, "grad_norm": 0.5}, {}, True),
        ({"kl_mean": 0.0, "grad_norm": 0.0}, {}, True),
        ({**FROZEN, "learning_rate": 0.0}, {}, False),  # MarinFold 237, the control
        ({**FROZEN, "reward_std": 0.0}, {}, False),  # nothing to learn from yet: all rewards are equal
        ({"kl_mean": 0.0}, {}, False),
        (FROZEN, {"rounded": True}, False),
        (FROZEN, {"kl_kind": "old_policy"}, False),
    ],
)
def test_kl_frozen(row, config, fires):
    """Six observations after step 3, where there is something to learn."""
    assert said(KLFrozen(GuardConfig(**config)), [row] * 12) == ([(9, "warn")] if fires else [])


def test_kl_frozen_while_the_reward_moves():
    """Between steps, where its spread within a step is not logged."""
    rows = [{"kl_mean": 0.0, "grad_norm": 1.0, "reward": 0.1 * (step % 3)} for step in range(12)]
    assert said(KLFrozen(), rows) == [(9, "warn")]


def test_kl_saturated():
    """Clamped to 10 (verl 1779, ms-swift 8464); a maximum that moves is none, nor is a small constant."""
    assert said(KLSaturated(), [{"kl_max": 10.0}, {"kl_max": 7.5}, {"kl_max": 10.0}] * 5) == [(10, "info")]
    assert said(KLSaturated(), [{"kl_max": 10.0 + step} for step in range(30)]) == []
    assert said(KLSaturated(), [{"kl_max": 0.0}] * 30) == []


def test_kl_spikes_of_another_kind():
    """Where no floor is known, five numbers come first."""
    config = GuardConfig(kl_kind="sequence_sum")
    spike = [{"kl_mean": kl} for kl in (1000.0, 10.0, 10.0)]
    assert said(KLSpikes(config), [{"kl_mean": 10.0}] * 4 + spike) == []
    assert said(KLSpikes(config), [{"kl_mean": 10.0}] * 5 + spike) == [(8, "info")]


def test_kl_plateau():
    """Twenty observations above the level, without growth; other kinds of KL have other levels."""
    assert said(KLPlateau(), [{"kl_mean": 1.5}] * 19) == []
    assert said(KLPlateau(), [{"kl_mean": 1.5}] * 30) == [(20, "warn")]
    assert said(KLPlateau(GuardConfig(plateau_level=2.0)), [{"kl_mean": 1.5}] * 40) == []
    assert said(KLPlateau(GuardConfig(kl_kind="sequence_sum")), [{"kl_mean": 7.0}] * 40) == []


def test_kl_plateau_is_not_said_of_a_blow_up():
    """What is still growing is told by KL_BLOWUP, once."""
    guard = KLGuard(GuardConfig(action="warn"), announce=False)
    for step in range(1, 120):
        guard.observe(step, 0.02 if step < 40 else min(30.0, 0.02 * 1.3 ** (step - 40)))
    assert [f.signature for f in guard.findings if f.signature in ("KL_BLOWUP", "KL_PLATEAU")] == ["KL_BLOWUP"]


def test_reference_reset():
    """NeMo-RL 2955: each resume resets KL to about 0; a dip by half is none, and where KL was small it says nothing."""
    detector = ReferenceReset()
    detector.expect(40, 0.3)
    assert said(detector, [{"kl_mean": kl} for kl in (0.0, 0.001, 0.002)], first=41) == [(43, "warn")]
    detector.reset()
    detector.expect(40, 0.3)
    assert said(detector, [{"kl_mean": 0.15}] * 5, first=41) == []
    detector.reset()
    detector.expect(40, 0.005)
    assert said(detector, [{"kl_mean": 0.0}] * 5, first=41) == []


def test_reference_reset_of_another_kind():
    """The least KL that counts holds for token means only."""
    detector = ReferenceReset(GuardConfig(kl_kind="sequence_sum"))
    detector.expect(40, 0.005)
    assert said(detector, [{"kl_mean": 0.0}] * 5, first=41) == [(43, "warn")]


def test_reference_reset_of_a_resumed_run(tmp_path):
    """Seen by a guard in a new process, from its journal."""
    first = KLGuard(GuardConfig(), output_dir=tmp_path, announce=False)
    for step in range(1, 61):
        first.observe(step, 0.3)
    first.close()
    second = KLGuard(GuardConfig(), output_dir=tmp_path, announce=False)
    second.resumed(50)
    for step in range(51, 55):
        second.observe(step, 0.0002 * (step - 50))
    assert [(f.signature, f.step) for f in second.findings][-1] == ("REFERENCE_RESET", 53)
    assert second.findings[-1].causes[0].name == "the reference was captured after the checkpoint was loaded"


def test_reference_changed():
    """Looked at now and then; the same sum is the same reference."""
    assert said(ReferenceChanged(), [{"reference_checksum": 5.0}, {}, {"reference_checksum": 5.0}]) == []
    assert said(ReferenceChanged(), [{"reference_checksum": 5.0}, {}, {"reference_checksum": 5.1}]) == [(3, "warn")]


def test_entropy_collapse():
    """From above 1 to below a quarter, or to a tenth, three times in a row; a single dip is none."""
    high, low = {"entropy": 1.4}, {"entropy": 0.2}
    assert said(EntropyCollapse(), [high] * 6 + [low] * 3) == [(9, "warn")]
    assert said(EntropyCollapse(), [high] * 6 + [low, low, high] * 9) == []
    assert said(EntropyCollapse(), [{"entropy": 0.8}] * 6 + [low] * 9) == []
    assert said(EntropyCollapse(), [{"entropy": 0.8}] * 6 + [{"entropy": 0.07}] * 3) == [(9, "warn")]
    assert said(EntropyCollapse(), [{"entropy": math.nan}] * 20) == []
    assert said(EntropyCollapse(), [{"entropy": 0.5}] * 6 + [{"entropy": 0.1}] * 9) == []
    assert said(EntropyCollapse(), [{"entropy": 0.5}] * 6 + [{"entropy": 0.04}] * 9) == [(9, "warn")]


def test_entropy_collapse_where_a_step_is_told_twice():
    """While the start is being settled the first word counts."""
    detector = EntropyCollapse()
    for step in range(1, 6):
        for entropy in (1.4, 0.05):
            assert detector.update(Observation(step, entropy=entropy)) is None
    found = [detector.update(Observation(step, entropy=0.2)) for step in range(6, 9)]
    assert [(finding.step, finding.evidence["start"]) for finding in found if finding] == [(7, 1.4)]


def test_entropy_collapse_is_named_with_a_blow_up():
    """As its companion."""
    guard = KLGuard(announce=False)
    for step in range(1, 120):
        decision = guard.observe(
            step, 0.02 if step < 40 else 0.02 * 1.5 ** (step - 40), entropy=1.5 if step < 42 else 0.1
        )
        if decision:
            break
    assert decision.reason.signature == "KL_BLOWUP"
    assert "ENTROPY_COLLAPSE" in decision.reason.evidence["companions"]


def test_token_outlier():
    """Now and then is information, often is a warning; many tokens with some KL each are neither."""
    assert said(TokenOutlier(), [PLAIN] * 40) == []
    assert said(TokenOutlier(), ([CONCENTRATED] + [PLAIN] * 9) * 5) == [(1, "info")]
    assert said(TokenOutlier(), [CONCENTRATED, PLAIN] * 10) == [(1, "info"), (9, "warn")]
    assert said(TokenOutlier(), [{"kl_mean": 1e-6, "kl_max": 1e-3, "top_share": 0.9}] * 9) == []


@pytest.mark.parametrize("name", ["end_share", "place_share", "id_share"])
def test_drift_asymmetry(name):
    """Half of an elevated KL at one kind of place, three times in a row."""
    row = {"kl_mean": 0.4, name: 0.6, "id_of_share": 2.0}
    assert said(DriftAsymmetry(), [row] * 5) == [(3, "warn")]
    assert said(DriftAsymmetry(), [{**row, "kl_mean": 0.02}] * 9) == []
    assert said(DriftAsymmetry(), [row, row, {**row, name: 0.1}] * 5) == []


def test_drift_asymmetry_of_another_kind():
    """What is elevated is known of token means only; a KL of 0 sits nowhere."""
    config = GuardConfig(kl_kind="sequence_sum")
    assert said(DriftAsymmetry(config), [{"kl_mean": 0.02, "end_share": 0.6}] * 5) == [(3, "warn")]
    assert said(DriftAsymmetry(config), [{"kl_mean": 0.0, "end_share": 0.6}] * 5) == []


def test_drift_asymmetry_on_one_id():
    """Another id each time is no particular token."""
    rows = [{"kl_mean": 0.4, "id_share": 0.6, "id_of_share": float(step)} for step in range(9)]
    assert said(DriftAsymmetry(), rows) == []


def test_padding_in_mask():
    """Where it is counted, and lasts."""
    assert said(PaddingInMask(), [{"padding": 0}] * 5) == []
    assert said(PaddingInMask(), [{"padding": 4}, {"padding": 0}] * 5) == []
    assert said(PaddingInMask(), [{"padding": 4}] * 5) == [(3, "warn")]


def test_kl_that_is_measured_every_few_steps_is_not_missing():
    """With a probe every 10 steps; twenty steps without one are."""
    every_ten = [{"kl_mean": 0.1} if step % 10 == 0 else {} for step in range(60)]
    assert said(KLMissing(every=10), every_ten) == []
    assert said(KLMissing(every=10), [{"kl_mean": 0.1}] + [{}] * 40) == [(12, "info"), (21, "warn")]


def outlier_run(trimmed=0.02, rising=False, ratio=20.0):
    """A run whose mean KL blows up; `trimmed` is KL without its few largest tokens."""
    guard = KLGuard(announce=False)
    for step in range(1, 120):
        late = step > 60
        kl = 0.02 if not late else 0.02 * 1.25 ** (step - 60)
        extreme = ratio + (0.5 * max(0, step - 60) if rising else 0.1 * (step % 3))
        tokens = {
            "kl_token_mean": kl,
            "kl_trimmed": trimmed if late else 0.019,
            "log_ratio_extreme": extreme,
            "top_share": 0.9 * late,
        }
        decision = guard._observe(Observation(step, kl_mean=kl, kl_max=kl * 100, **tokens))
        if decision:
            break
    return guard, decision


def test_a_blow_up_of_a_few_tokens_is_a_warning():
    """Without them KL stays where it was, and the extreme log-ratio does not rise: no halt, and the cause is named."""
    guard, decision = outlier_run()
    assert decision.action == "continue"
    blow_up = next(f for f in guard.findings if f.signature == "KL_BLOWUP")
    assert blow_up.severity.value == "warn"
    assert blow_up.causes[0].name == "a few tokens carry the KL, not the policy at large"
    assert "without them KL is 0.02" in blow_up.message


@pytest.mark.parametrize("split", [30, 62, 75])
def test_a_blow_up_of_a_few_tokens_through_a_restart(split):
    """KL without the largest tokens and the extremes are remembered, those that were not seen too."""

    def observation(step):
        kl = 0.02 if step <= 60 else 0.02 * 1.25 ** (step - 60)
        tokens = {"kl_token_mean": kl, "kl_trimmed": 0.02, "log_ratio_extreme": 20.0 + 0.1 * (step % 3)}
        return Observation(step, kl_mean=kl, **(tokens if step % 7 or step > 20 else {}))

    detector, found = KLBlowup(), []
    for step in range(1, 100):
        if step == split:
            state = json.loads(json.dumps(detector.state_dict()))
            detector = KLBlowup()
            detector.load_state_dict(state)
        found += [finding for finding in [detector.update(observation(step))] if finding]
    assert [(finding.severity.value, finding.evidence["few_tokens"]) for finding in found] == [("warn", True)]


def test_a_rising_extreme_stays_critical():
    """Drift of the whole policy is often worst on some tokens first."""
    assert outlier_run(rising=True)[1].action == "halt"


@pytest.mark.parametrize("trimmed", [3.0, 0.3])
def test_where_the_rest_has_moved_too_it_stays_critical(trimmed):
    """A few tokens are the worst of it, not all of it: the rest is far above its own beginning."""
    assert outlier_run(trimmed=trimmed)[1].action == "halt"


def test_a_warning_becomes_critical_when_the_rest_follows():
    """Severity can rise."""
    guard = KLGuard(announce=False)
    for step in range(1, 140):
        kl = 0.02 if step <= 60 else 0.02 * 1.25 ** (step - 60)
        trimmed = 0.02 if step <= 100 else kl / 2
        tokens = {"kl_token_mean": kl, "kl_trimmed": trimmed, "log_ratio_extreme": 20.0 + 0.1 * (step % 3)}
        decision = guard._observe(Observation(step, kl_mean=kl, kl_max=kl, **tokens))
        if decision:
            break
    assert [f.severity.value for f in guard.findings if f.signature == "KL_BLOWUP"] == ["warn", "critical"]


def test_the_hard_ceiling_asks_the_same():
    """Three means in the thousands, made by one token each."""
    guard = KLGuard(announce=False)
    for step in range(1, 10):
        tokens = {"kl_token_mean": 5000.0, "kl_trimmed": 0.01, "log_ratio_extreme": 12.0 - step % 2, "top_share": 1.0}
        decision = guard._observe(Observation(step, kl_mean=5000.0, kl_max=2e7, **tokens))
    assert decision.action == "continue"
    assert [f.severity.value for f in guard.findings if f.signature == "KL_BLOWUP"] == ["warn"]


@pytest.mark.parametrize("start", [5, 15, 30, 60])
def test_one_token_that_is_wrong_from_some_step_on(start):
    """The extreme log-ratio steps up and stays: a warning that says so, whatever step it begins at, and no halt."""
    guard = KLGuard(announce=False)
    for step in range(1, start + 60):
        jitter = 0.01 * (step % 3)
        kl, extreme = (1.5e6, 22.6 + jitter) if step >= start else (0.02, 0.4 + jitter)
        tokens = {"kl_token_mean": kl, "kl_trimmed": 0.02, "log_ratio_extreme": extreme, "top_share": 1.0}
        decision = guard._observe(Observation(step, kl_mean=kl, kl_max=4300 * kl, **tokens))
    assert decision.action == "continue"
    assert [f.severity.value for f in guard.findings if f.signature == "KL_BLOWUP"] == ["warn"]


def test_a_token_that_goes_on_rising_halts():
    """Three percent of the log-ratio a step, nothing else moves: that is training, not one wrong score."""
    guard = KLGuard(announce=False)
    for step in range(1, 80):
        extreme = 8.0 * (1 + 0.03 * (step - 30)) if step >= 30 else 0.4
        kl = math.exp(extreme) / 4300 if step >= 30 else 0.02
        tokens = {"kl_token_mean": kl, "kl_trimmed": 0.02, "log_ratio_extreme": extreme, "top_share": 1.0}
        if guard._observe(Observation(step, kl_mean=kl, kl_max=4300 * kl, **tokens)):
            break
    assert guard.decision.action == "halt"


def test_the_founding_report_halts():
    """Torchforge 664: the extreme log-ratio rises from step to step, so the ceiling acts."""
    guard = KLGuard(announce=False)
    extremes = [1.8, 8.9, 14.6, 16.9, 20.0, 23.7, 22.0, 22.3, 22.64]
    means = [0.01, 0.4, 25.0, 1e3, 5e3, 2e4, 1e6, 1.2e6, 1568987.96]
    for step, (extreme, kl) in enumerate(zip(extremes, means, strict=True), start=1):
        tokens = {"kl_token_mean": kl, "kl_trimmed": 0.01, "log_ratio_extreme": extreme, "top_share": 1.0}
        decision = guard._observe(Observation(step, kl_mean=kl, kl_max=kl * 4300, beta=1e-6, **tokens))
        if decision:
            break
    assert decision.action == "halt"
    names = [cause.name for cause in decision.reason.causes]
    assert "there is hardly any KL penalty" in names
