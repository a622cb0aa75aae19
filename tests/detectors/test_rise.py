"""The incremental rule equals the naive batch rule after every prefix, at both levels and with both horizons."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_guard import GuardConfig, Observation
from kl_guard.detectors import KLBlowup, KLGrowth, RiseMonitor
from oracle import Rule, judge
from streams import blow_up, finite_series, holed_series


def rules(config, warmup):
    """The oracle's two levels for a configuration."""
    multi = config.horizon == "multi"
    shared = {
        "ratio": config.ratio,
        "sustain": config.sustain,
        "alpha": config.alpha,
        "min_observations": config.min_observations,
        "robust": config.robust,
        "multi": multi,
    }
    blowup = Rule(abs_floor=config.abs_floor, warmup=warmup, cold_factor=config.cold_factor, **shared)
    return blowup, Rule(abs_floor=config.abs_floor * 0.2, warmup=0, record_factor=2.0, noise=False, **shared)


configs = st.builds(
    GuardConfig,
    ratio=st.sampled_from([2.0, 8.0]),
    abs_floor=st.sampled_from([0.05, 0.5]),
    sustain=st.integers(1, 4),
    alpha=st.sampled_from([0.05, 0.9]),
    min_observations=st.sampled_from([5, 12, 20]),
    robust=st.booleans(),
    horizon=st.sampled_from(["multi", "run"]),
    warmup=st.sampled_from([0, 5, 20]),
)


def check_every_prefix(config, values):
    """Feed `values` one by one and compare both levels with the oracle at each prefix."""
    monitor, seen = RiseMonitor(config), []
    blowup, growth = rules(config, config.warmup)
    for step, value in enumerate(values, start=1):
        pushed = monitor.push(Observation(step, kl_mean=value))
        assert pushed == (value is not None and math.isfinite(value))
        if pushed:
            seen.append(value)
        for rise, rule, skip in ((monitor.critical(), blowup, 0), (monitor.growth(), growth, config.warmup)):
            expected = judge(seen[skip:], rule)
            assert (rise is None) == (expected is None), (step, rise, expected)
            if rise is not None:
                assert rise.horizon == expected.horizon
                assert rise.threshold == pytest.approx(expected.threshold, rel=1e-12)
                assert monitor.onset(rise) == expected.onset + skip


@given(configs, finite_series(max_size=200))
def test_equals_the_batch_rule(config, values):
    """Random walks, ties, constants, spikes and rises."""
    check_every_prefix(config, values)


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_batch_rule_on_noisy_rises_early_in_a_run(seed):
    """Where the noise of log KL decides: rises that begin before observation 120."""
    rng = np.random.default_rng(seed)
    before, doubling, deviation = 10 ** rng.uniform(-2.3, -0.8), rng.uniform(8, 25), rng.uniform(0.3, 0.7)
    behind = np.clip(np.arange(200) - rng.integers(60, 120), 0, None)
    values = before * np.exp2(np.minimum(behind / doubling, 5)) * np.exp(rng.normal(0, deviation, 200))
    check_every_prefix(GuardConfig(abs_floor=0.1), values.tolist())


@given(configs, holed_series())
def test_holes_are_left_out(config, values):
    """NaN, infinities and missing values: the rule sees the finite numbers only."""
    check_every_prefix(config, values)


@given(configs, finite_series(max_size=120), st.integers(1, 150), finite_series(max_size=60))
def test_after_going_back_nothing_of_the_dropped_part_is_left(config, values, keep, after):
    """Truncated and fed on, the monitor equals one that never saw the dropped part."""
    went_back, fresh = RiseMonitor(config), RiseMonitor(config)
    for step, value in enumerate(values, start=1):
        went_back.push(Observation(step, kl_mean=value))
        went_back.critical()
        if step <= keep:
            fresh.push(Observation(step, kl_mean=value))
    went_back.reset()  # as the guard goes back: forget, and read again what is kept
    for step, value in enumerate(values[:keep], start=1):
        went_back.push(Observation(step, kl_mean=value))
    for step, value in enumerate(after, start=keep + 1):
        for monitor in (went_back, fresh):
            monitor.push(Observation(step, kl_mean=value))
        assert went_back.critical() == fresh.critical()
        assert went_back.growth() == fresh.growth()


@given(configs, finite_series(max_size=100), st.integers(0, 100))
def test_state_through_json_goes_on_alike(config, values, split):
    """Saved and restored in the middle, both detectors say the same as without."""
    straight = KLBlowup(config), KLGrowth(config)
    halved = KLBlowup(config), KLGrowth(config)
    for step, value in enumerate(values, start=1):
        if step == split:
            restored = KLBlowup(config), KLGrowth(config)
            for old, new in zip(halved, restored, strict=True):
                new.load_state_dict(json.loads(json.dumps(old.state_dict())))
            halved = restored
        for a, b in zip(straight, halved, strict=True):
            observation = Observation(step, kl_mean=value)
            assert a.update(observation) == b.update(observation)
            assert a.active == b.active


def first(detector, values):
    """The first finding of a detector over a series."""
    found = (detector.update(Observation(step, kl_mean=v)) for step, v in enumerate(values, start=1))
    return next((f for f in found if f is not None), None)


def test_critical_is_found_with_onset_and_departure():
    """A clean exponential rise from step 40: departure at its beginning, onset at the crossing, alarm soon after."""
    finding = first(KLBlowup(), blow_up(start=40))
    assert finding.severity == "critical"
    assert abs(finding.departure_step - 40) <= 1
    assert finding.departure_step <= finding.onset_step <= finding.step <= finding.onset_step + 6


def test_the_warning_comes_no_later():
    """KL_GROWTH has a fifth of the floor."""
    warning, alarm = first(KLGrowth(), blow_up(start=40)), first(KLBlowup(), blow_up(start=40))
    assert warning.severity == "warn"
    assert warning.step < alarm.step


def test_late_trouble_is_seen_as_fast_as_early_trouble():
    """With trailing horizons the delay does not grow with the length of the run; with the run horizon it does."""
    delays = {}
    for horizon in ("multi", "run"):
        for start in (100, 900):
            alarm = first(KLBlowup(GuardConfig(horizon=horizon)), blow_up(start, start + 300, growth=1.15, cap=50))
            delays[horizon, start] = alarm.step - alarm.onset_step
    assert delays["multi", 900] == delays["multi", 100] <= 12
    assert delays["run", 900] > 5 * delays["multi", 900]


@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
def test_the_hard_ceiling_acts_from_the_first_step(kl_kind):
    """`sustain` observations above it are enough, whatever the trend."""
    finding = first(KLBlowup(GuardConfig(hard_ceiling=5.0, kl_kind=kl_kind)), [6.0, 6.0, 6.0])
    assert (finding.step, finding.onset_step) == (3, 1)
    assert "hard ceiling of 5" in finding.message


def test_the_hard_ceiling_is_for_token_means_only():
    """A sequence sum of 60 nats is nothing unusual."""
    assert first(KLBlowup(GuardConfig(hard_ceiling=5.0, kl_kind="sequence_sum")), [60.0] * 30) is None


def test_the_hard_ceiling_needs_a_row_of_observations():
    """Two spikes with a sound step between them are no row."""
    assert first(KLBlowup(), [1e6, 1e6, 0.1, 1e6, 1e6]) is None


def test_an_infinite_kl_alone_does_not_break_the_ceiling():
    """With no finite number there is nothing to fit; the finding still has an onset."""
    finding = first(KLBlowup(), [math.inf] * 3)
    assert finding.onset_step == finding.departure_step == 3


@pytest.mark.parametrize("doubling", [8, 10, 20, 40])
def test_a_slow_rise_is_followed_back_to_its_beginning(doubling):
    """When all that is near the onset lies in the trouble, the departure is looked for further back."""
    values = [0.0015 * 2.0 ** (max(0, step - 200) / doubling) for step in range(1, 900)]
    finding = first(KLBlowup(), values)
    assert abs(finding.departure_step - 200) <= 2
    assert finding.onset_step > 200 + 6 * doubling


def test_a_departure_never_lies_after_its_onset():
    """Whatever the shape, the place to go behind is not later than the crossing."""
    for growth in (1.03, 1.1, 1.5, 3.0, 50.0):
        for start in (5, 25, 60):
            finding = first(KLBlowup(), blow_up(start, start + 150, growth=growth))
            assert finding is not None
            assert finding.departure_step <= finding.onset_step <= finding.step


def test_rounding_near_zero_is_no_noise():
    """KL that is next to nothing scatters wildly on a log scale; a jump out of it is said as soon as it has lasted."""
    rng = np.random.default_rng(3)
    values = [*(10.0 ** rng.uniform(-6, -3, 30)), *(2.0 + 0.05 * np.arange(20))]
    finding = first(KLBlowup(), values)
    assert finding.severity == "critical"
    assert finding.step <= 36
