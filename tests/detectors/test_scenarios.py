"""Fixed scenarios, as the field reports them: which alarm comes, and which does not."""

import math
import random

import pytest

from kl_guard import GuardConfig, KLGuard, replay

SILENT = {
    "healthy start that doubles every step (unsloth 2291)": [
        0,
        0,
        0.00001,
        0.000028,
        0.000056,
        0.000156,
        0.000446,
        0.000658,
        0.001667,
        0.0023,
        0.002576,
    ],
    "tight plateau (trl 3452)": [0.0005371, 0.0005386, 0.0005338, 0.0005279] * 60,
    "sequence sums (hongbomiao 37684)": [6.81, 6.95, 7.57, 10.9, 11.1, 12.4, 10.5, 11.3],
    "learning rate 0": [0.0] * 200,
    "lone spike of a token (open-r1-multimodal 16)": [0.05] * 60 + [5e8] + [0.05] * 60,
    "saturating rise": [0.3 * (1 - math.exp(-i / 40)) for i in range(400)],
    "linear drift to 0.4": [0.4 * i / 400 for i in range(400)],
}


@pytest.mark.parametrize("values", SILENT.values(), ids=SILENT.keys())
def test_healthy_runs_are_never_halted(values):
    """No critical finding and no decision."""
    result = replay(values)
    assert result.decision.action == "continue"
    assert not [f for f in result.findings if f.severity == "critical"]


def test_noisy_settling_runs_are_never_halted():
    """Rises from zero that settle between 0.1 and 0.8, with noise and rare spikes."""
    for seed in range(60):
        rng = random.Random(seed)
        level, tau, noise, x = rng.uniform(0.1, 0.8), rng.uniform(10, 100), rng.uniform(0.2, 0.5), 0.0
        rho = rng.uniform(0, 0.8)
        values = []
        for i in range(300):
            x = rho * x + rng.gauss(0, noise * math.sqrt(1 - rho**2))
            spike = 50 if rng.random() < 0.01 else 1
            values.append(level * (1 - math.exp(-i / tau)) * math.exp(x) * spike)
        assert replay(values).fired_at is None, seed


def noisy_blow_up(seed, start, doubling, length=400):
    """A noisy plateau that begins to double every `doubling` steps at `start`."""
    rng = random.Random(seed)
    return [
        0.05 * math.exp(rng.gauss(0, 0.3)) * (2 ** ((i - start) / doubling) if i > start else 1)
        for i in range(1, length + 1)
    ]


@pytest.mark.parametrize("start", [30, 100, 200])
@pytest.mark.parametrize("doubling", [3, 8, 20])
def test_blow_ups_are_halted_soon_after_they_cross(start, doubling):
    """From 0.05, KL crosses 1 (the floor of a cold window) after 4.3 doublings; halted within 16 observations."""
    for seed in range(5):
        result = replay(noisy_blow_up(seed, start, doubling))
        crossing = start + 4.3 * doubling
        assert result.fired_at is not None
        assert result.fired_at <= crossing + 16, seed
        assert result.departure_step <= result.onset_step


def test_the_published_rule_halts_where_the_robust_one_does_not():
    """`robust=False` drops median, record and cold factor: a lone spike in the late part then suffices."""
    spiky = [0.05 + 0.0001 * i for i in range(60)] + [500.0]
    assert replay(spiky, robust=False, horizon="run").fired_at is not None
    assert replay(spiky, horizon="run").fired_at is None


def test_a_cold_window_needs_twice_the_floor():
    """A run that settles at 0.7 early is let pass; the same climb later is not."""
    climb = [0.7 / (1 + math.exp((25 - i) / 4)) for i in range(60)]
    assert replay(climb).fired_at is None
    assert replay([0.02] * 60 + climb).fired_at is not None
    assert replay(climb, cold_factor=1.0).fired_at is not None


def test_halt_on_warn_concerns_growth_only():
    """An early warning halts if the user asks for it; a wrong reference does not."""
    growth = [0.01] * 40 + [0.01 * 1.1**i for i in range(33)]
    assert replay(growth).decision.action == "continue"
    early = replay(growth, halt_on="warn")
    assert early.decision.reason.signature == "KL_GROWTH"
    assert replay([2.2] * 40, halt_on="warn").decision.action == "continue"


def test_short_runs_get_a_shorter_warm_up():
    """With 40 observations to come the warm-up is 10; with 20, growth this slow would not be seen before the end."""
    values = [0.01] * 10 + [0.01 * 1.12**i for i in range(30)]
    assert [f.signature for f in replay(values).findings] == ["KL_GROWTH"]
    guard = KLGuard(announce=False)
    for step, value in enumerate(values, start=1):
        guard.observe(step, value)
    assert guard.findings == []
    assert GuardConfig().warmup_of(40) == 10
    assert GuardConfig().warmup_of(None) == GuardConfig().warmup_of(4000) == 20
