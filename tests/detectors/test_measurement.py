"""KL_NONFINITE, KL_MISSING, REFERENCE_MISMATCH, RESTORED_KL_HIGH and the rest: what else a series can say."""

import json
import math

import pytest

from kl_guard import GuardConfig, Observation, replay
from kl_guard.detectors import KLMissing, KLNonfinite, ReferenceMismatch, RestoredKL

NAN, INF = math.nan, math.inf


def findings(detector, rows):
    """All findings of a detector over rows, as (step, severity)."""
    out = []
    for step, row in enumerate(rows, start=1):
        finding = detector.update(Observation(step, **row))
        if finding:
            out.append((finding.step, finding.severity.value))
    return out


SOUND = {"kl_mean": 0.1, "grad_norm": 0.5, "loss": 0.01}
CRITICAL = {
    "all NaN for ever (Agent-R1 30)": ([SOUND] * 81 + [{"kl_mean": NAN, "grad_norm": NAN, "loss": NAN}], 82),
    "inf KL with NaN gradient": ([SOUND, {"kl_mean": INF, "grad_norm": NAN}], 2),
    "NaN KL with NaN loss": ([SOUND, {"kl_mean": NAN, "loss": NAN}], 2),
    "inf KL three times": ([{"kl_mean": INF, "grad_norm": 1.0}] * 3, 3),
    "NaN gradient three times, KL sound": ([{"kl_mean": 0.1, "grad_norm": NAN}] * 3, 3),
    "NaN gradient three times, KL missing": ([{"grad_norm": INF}] * 3, 3),
    "NaN gradient and reward std at step 1 (R1-V 69)": (
        [{"kl_mean": 0.00072, "grad_norm": NAN, "reward_std": NAN}],
        1,
    ),
}
NOT = {
    "single overflow of an fp16 scaler": [SOUND, {"kl_mean": 0.1, "grad_norm": INF}, SOUND] * 5,
    "masked batch on and off (ms-swift 4465)": [
        {"kl_mean": NAN, "loss": -0.037, "grad_norm": 0.006, "reward": 1.55},
        SOUND,
    ]
    * 30,
    "inf now and then": [SOUND, {"kl_mean": INF, "grad_norm": 1.0}] * 20,
    "reward std NaN alone": [{"kl_mean": 0.1, "grad_norm": 0.5, "reward_std": NAN}] * 10,
    "nothing logged": [{}] * 30,
}


@pytest.mark.parametrize(("rows", "step"), CRITICAL.values(), ids=CRITICAL.keys())
def test_nonfinite_is_critical(rows, step):
    """Said at the step at which it is sure."""
    assert findings(KLNonfinite(), rows) == [(step, "critical")]


@pytest.mark.parametrize("rows", NOT.values(), ids=NOT.keys())
def test_nonfinite_is_silent(rows):
    """What training recovers from by itself."""
    assert findings(KLNonfinite(), rows) == []


def test_nonfinite_onset_is_the_beginning_of_the_row():
    """A rollback must go behind the first of the broken steps."""
    rows = [Observation(s, kl_mean=0.1, grad_norm=0.5 if s < 7 else NAN) for s in range(1, 10)]
    detector = KLNonfinite()
    finding = next(f for f in map(detector.update, rows) if f)
    assert (finding.step, finding.onset_step, finding.departure_step) == (9, 7, 7)


def test_more_known_about_a_step_counts():
    """KL first, gradient norm later, for the same step: judged together, and a row is not counted twice."""
    detector = KLNonfinite()
    assert detector.update(Observation(1, kl_mean=NAN)) is None
    assert detector.update(Observation(1, kl_mean=NAN, grad_norm=NAN)).severity == "critical"
    detector = KLNonfinite()
    for _ in range(5):
        assert detector.update(Observation(1, kl_mean=INF)) is None


def test_missing_is_info_then_warn_and_never_halts():
    """Once each, after 1 and after 20 observations; a sound step in between starts the count anew."""
    masked = {"kl_mean": NAN, "loss": -0.037, "grad_norm": 0.006}
    assert findings(KLMissing(), [SOUND] * 3 + [masked] * 40) == [(4, "info"), (23, "warn")]
    assert findings(KLMissing(), [masked, SOUND] * 30) == [(1, "info")]
    rows = [{"step": i, "loss": 0.1, "grad_norm": 0.2} for i in range(1, 60)]
    result = replay(rows)
    assert result.decision.action == "continue"
    assert [f.signature for f in result.findings] == ["KL_MISSING", "KL_MISSING"]


def test_missing_leaves_broken_steps_to_nonfinite():
    """NaN KL with a NaN gradient is not a masked batch."""
    assert findings(KLMissing(), [{"kl_mean": NAN, "grad_norm": NAN}] * 30) == []


def test_missing_says_why():
    """Never seen: beta 0 or another name; seen before: a masked batch."""
    detector = KLMissing()
    assert detector.update(Observation(1, loss=0.1)) is None  # the rest of the step may still come
    never = detector.update(Observation(2, loss=0.1))
    assert "beta 0" in never.message
    assert "not logged" in never.message
    detector = KLMissing()
    detector.update(Observation(1, **SOUND))
    assert "masked" in detector.update(Observation(2, kl_mean=NAN)).message


@pytest.mark.parametrize(
    ("config", "observation", "expected"),
    [
        ({}, Observation(1, kl_mean=2.2), "warn"),
        ({}, Observation(0, kl_mean=0.86), "warn"),
        ({}, Observation(1, kl_mean=0.05), None),
        ({}, Observation(10, kl_mean=2.2, window=10), "info"),
        ({}, Observation(7, kl_mean=2.2), "info"),
        ({"kl_kind": "sequence_sum"}, Observation(1, kl_mean=6.81), "info"),
    ],
)
def test_reference_mismatch(config, observation, expected):
    """A warning only where policy and reference must be equal: step 1, not averaged, token mean."""
    finding = ReferenceMismatch(GuardConfig(**config)).update(observation)
    assert (finding.severity.value if finding else None) == expected


def test_reference_mismatch_judges_the_first_kl_only():
    """A later rise is not a wrong reference; missing values before the first number do not count."""
    detector = ReferenceMismatch()
    assert findings(detector, [{"kl_mean": None}, {"kl_mean": 0.01}, {"kl_mean": 3.0}]) == []
    resumed = ReferenceMismatch()
    resumed.resumed()
    assert findings(resumed, [{"kl_mean": 3.0}]) == []


def test_reference_mismatch_is_active_within_twice_the_first_value():
    """While it is, going back cannot help."""
    detector = ReferenceMismatch()
    actives = []
    for step, kl in enumerate([2.0, 3.9, NAN, 4.1, 2.0], start=1):
        detector.update(Observation(step, kl_mean=kl))
        actives.append(detector.active)
    assert actives == [True, True, False, False, True]


def restored(values, recorded=0.02, config=None):
    """What is said of the first KLs after going back to step 40."""
    detector = RestoredKL(config)
    detector.expect(40, recorded)
    found = [detector.update(Observation(41 + i, kl_mean=v)) for i, v in enumerate(values)]
    return [f and (f.step, f.severity.value) for f in found if f]


@pytest.mark.parametrize(
    ("values", "recorded", "said"),
    [
        ([0.02] * 9, 0.02, []),
        ([0.3] * 9, 0.02, [(45, "warn")]),
        ([0.3] * 9, 0.2, []),
        ([2.0, 2.0, 0.3, 0.03, 0.02, 0.02], 0.02, [(45, "warn")]),  # median 0.3
        ([2.0, 2.0, 0.03, 0.03, 0.02, 0.02], 0.02, []),  # engines may need some steps
        ([2.0] * 9, 0.02, [(45, "critical")]),
        ([2.0] * 9, 0.9, []),
        ([math.nan, 2.0, None, 2.0, 2.0, 2.0, 2.0], 0.02, [(47, "critical")]),
        ([9.0] * 9, None, []),
    ],
)
def test_restored_kl(values, recorded, said):
    """Against what was recorded at that checkpoint, five together."""
    assert restored(values, recorded) == said


def test_restored_kl_of_another_kind():
    """A sequence sum has no absolute limits: only the ratio counts, and not against zero."""
    config = GuardConfig(kl_kind="sequence_sum")
    assert restored([9.0] * 9, 4.0, config) == []
    assert restored([13.0] * 9, 4.0, config) == [(45, "critical")]
    assert restored([13.0] * 9, 0.0, config) == []


def test_restored_kl_counts_steps_once_and_keeps_its_state():
    """The same step observed again is one; state goes through JSON."""
    detector = RestoredKL()
    detector.expect(40, 0.02)
    for step in (41, 41, 41, 42, 43):
        assert detector.update(Observation(step, kl_mean=2.0)) is None
    other = RestoredKL()
    other.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert other.update(Observation(44, kl_mean=2.0)) is None
    assert other.update(Observation(45, kl_mean=2.0)).severity == "critical"
    assert other.update(Observation(40, kl_mean=2.0)) is None
