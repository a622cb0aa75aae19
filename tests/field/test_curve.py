"""Reported curves: what KL looked like, and what the guard makes of it."""

import csv
import math
import random
import re
from pathlib import Path

import pytest

from field_runs import batch, feed, findings, lines, silent
from kl_guard import GuardConfig, KLGuard, replay
from kl_guard.report import render, story_of
from kl_guard.tokens import summarize_tokens

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parent.parent.parent


def test_torchforge_664(tmp_path):
    """One token of 22.64 nats made a mean KL of 1.6 million: it is named, its growth told, and beta, rate and mask."""
    # Reported: the extremes of steps 1 to 4 and 6, and the KL of step 9; those of steps 5, 7 and 8 are filled in.
    highest = [1.7, 8.9, 11.7, 15.3, 14.0, 12.2, 17.0, 20.0, 22.64339]
    lowest = [-1.8, -8.5, -14.6, -16.9, -20.0, -23.7, -21.0, -20.0, -20.0]
    guard = KLGuard(output_dir=tmp_path, announce=False)
    for step, (high, low) in enumerate(zip(highest, lowest, strict=True), start=1):
        policy, reference, mask, ids = batch(step, rows=4, width=1087)  # 4,348 tokens: largest by mean, as reported
        policy[2, 500], reference[2, 500], ids[2, 500] = -0.5 - high, -0.5, 7
        policy[1, 200], reference[1, 200] = -0.5, -0.5 + low
        summary = summarize_tokens(policy, reference, mask, ids)
        decision = guard.observe(step, tokens=summary, beta=1e-6, loss=-0.198, learning_rate=1e-5)
        if decision:
            break
    assert step == 9
    assert guard.history[-1].kl_mean == pytest.approx(1_568_987.96, rel=1e-3)
    assert guard.history[-1].kl_max == pytest.approx(6_821_680_128, rel=1e-3)
    (outlier,) = [f for f in findings(guard, "TOKEN_OUTLIER") if f.severity == "warn"]
    named = next(c for c in outlier.causes if c.name == "a few tokens carry the KL, not the policy at large")
    assert re.search(
        r"id 7 at position 500 .* \(log-prob -\d+\.?\d* by the policy, -0.5 by the reference\)", named.evidence
    )
    blow_up = findings(guard, "KL_BLOWUP")[-1]
    assert {c.name for c in blow_up.causes} >= {
        "there is hardly any KL penalty",
        "the learning rate is too high",
        "the mask may let tokens through that the policy did not sample",
    }
    assert outlier.step == 6
    guard.close()
    growth = "the extreme log-ratio has grown from 1.8 to 23.7 in 6 observations"
    assert growth in render(story_of(tmp_path / "kl_guard"))


def test_unsloth_2291():
    """A healthy start doubles at every step: silent."""
    reported = [0, 0, 0.00001, 0.000028, 0.000056, 0.000156, 0.000446, 0.000658, 0.001667, 0.0023, 0.002576]
    settles = [0.0028 + 0.0002 * math.sin(step) for step in range(80)]  # filled in
    assert replay(reported).findings == ()
    assert silent(replay(reported + settles).findings)


@pytest.mark.parametrize("abs_floor", [0.5, 1e-4])
def test_trl_3452(abs_floor):
    """A plateau within 3 % for long, then a wobble of 10 %: silent, also where the user's floor lies below it."""
    reported = [0.0005371, 0.0005386, 0.0005338, 0.0005279]
    wobble = [0.00053 * (1.1 if step % 7 < 3 else 0.95) for step in range(60)]  # filled in
    result = replay(reported * 60 + wobble, abs_floor=abs_floor)
    assert silent(result.findings)
    assert result.fired_at is None


def test_hongbomiao_37684():
    """Sums over sequences beside a flat approximate KL: silent, and the user can name the key."""
    sums = [6.81, 6.95, 7.57, 10.9, 11.1, 12.4, 10.5, 11.3]
    rows = [
        {"step": step, "objective/kl": kl, "policy/approxkl_avg": 0.0024}
        for step, kl in enumerate(sums + [11.0, 10.6, 11.4, 10.9] * 15, start=1)  # the rest is filled in
    ]
    result = replay(rows)
    assert silent(result.findings)
    assert (result.source.name, result.source.kind) == ("objective/kl", "sequence_sum")
    assert result.source.others == ("policy/approxkl_avg",)
    named = replay(rows, key="policy/approxkl_avg")
    assert (named.source.kind, named.fired_at) == ("old_policy", None)
    guard = KLGuard(announce=False)
    guard.log(rows[0], key="policy/approxkl_avg")
    assert guard.history[0].kl_mean == 0.0024


def test_ms_swift_4800():
    """KL .54 at the second value that was logged: too early for a trend; a ceiling of the user's acts from step 1."""
    rows = [{"kl_mean": kl, "learning_rate": 1e-5, "reward": reward} for kl, reward in [(0.0, 0.3), (0.5355, 0.0)]]
    assert feed(KLGuard(announce=False), rows).action == "continue"
    strict = GuardConfig(hard_ceiling=0.4, sustain=1)
    guard = KLGuard(strict, announce=False)
    assert feed(guard, rows).action == "halt"
    assert guard.decision.reason.step == 2
    assert KLGuard(strict, announce=False).observe(1, 0.5355).action == "halt"


@pytest.mark.parametrize("spikes", [[3, 9, 40, 95], [2, 5, 17, 31, 66, 110, 171, 172 + 40, 260, 288]])
def test_open_r1_multimodal_16_openrlhf_931_525(spikes):
    """Spikes of 5e8 at random, early ones too, the next step normal: logged, counted per 100 steps, never a halt."""
    rng = random.Random(0)
    guard = KLGuard(announce=False)
    for step in range(1, 301):  # a KL of .01 is filled in for ratios of .997 to 1.002
        guard.observe(step, 5e8 if step in spikes else 0.01 * math.exp(rng.gauss(0, 0.2)), grad_norm=0.5)
        if step % 50 == 0:
            # A spike is known once two more steps are: of the 100 before them it counts those.
            assert guard.spikes == len([s for s in spikes if step - 102 < s <= step - 2]), step
    assert guard.decision.action == "continue"
    assert silent(guard.findings)
    (finding,) = findings(guard, "KL_SPIKES")
    assert finding.onset_step == spikes[0]


def marinfold(name):
    """The guard over a series of MarinFold experiment 237."""
    with (DATA / f"marinfold_237_{name}.csv").open() as file:
        return replay(list(csv.DictReader(file)))


@pytest.mark.parametrize("name", ["b_lr3e_6", "c", "f"])
def test_marinfold_237(name):
    """Slow drift, a collapse at a KL of .02 and noise with one token of 35 nats: nothing to say, nothing to stop."""
    result = marinfold(name)
    assert silent(result.findings)
    assert result.decision.action == "continue"


def test_marinfold_237_b():
    """Slow exponential growth that ruins the model at a KL of .49, below the floor: a warning, in time."""
    result = marinfold("b")
    (growth,) = [f for f in result.findings if f.signature == "KL_GROWTH"]
    assert growth.severity == "warn"
    assert 36 < growth.step <= 72  # the held-out score was best at 18 and gone at 80
    assert replay(DATA / "marinfold_237_b.csv", halt_on="warn").fired_at == growth.step


def test_marinfold_237_is_in_the_docs():
    """That some collapses do not show in KL is said where users read."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any("without a sign in KL" in path.read_text() for path in texts)


@pytest.mark.parametrize("level", [0.098, 0.168])
def test_marinfold_208_levels(level):
    """A KL of .098 harmed under one reward and one of .168 helped under another: no level alone says anything."""
    rng = random.Random(1)
    climb = [level * (1 - math.exp(-step / 20)) * math.exp(rng.gauss(0, 0.1)) for step in range(200)]  # filled in
    result = replay(climb)
    assert silent(result.findings)


def test_marinfold_208_diverged():
    """On its way to 3.96 it is halted; the same growth at a tenth of the height is with a floor of the user's own."""
    rise = [0.03] * 60 + [min(3.96, 0.03 * 1.15**step) for step in range(60)]  # filled in
    assert replay(rise).decision.reason.signature == "KL_BLOWUP"
    tenth = [kl / 10 for kl in rise]
    assert replay(tenth).fired_at is None
    assert replay(tenth, abs_floor=0.05).fired_at == replay(rise).fired_at


@pytest.mark.parametrize("jump", [160, 250, 400])
def test_ms_swift_6550_search_r1_88_convsearch_r1_6_thelmbook_6(tmp_path, caplog, jump):
    """Reward rises, then at a step that repeats it falls and KL jumps: halted, and told that a replay repeats it."""
    # Only the steps are reported; the curves are filled in.
    rng = random.Random(jump)

    def row(step):
        after = max(0, step - jump)
        return {
            "kl_mean": min(8.0, 0.04 * 1.4**after) * math.exp(rng.gauss(0, 0.1)),
            "reward": min(0.8, step / jump) - 0.1 * after,
        }

    guard = KLGuard(output_dir=tmp_path, rank=0)
    for step in range(1, jump + 40):
        decision = guard.observe(step, **row(step))
        if decision:
            break
        if step % 20 == 0:
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            (folder / "weights").write_text("w")
            guard.checkpoint_saved(step, folder)
    guard.close()
    assert decision.action == "halt"
    assert decision.reason.signature == "KL_BLOWUP"
    assert jump < step <= jump + 25
    assert jump - 40 <= decision.checkpoint.step < jump
    assert [line for line in lines(caplog) if "the same data and settings will likely fail the same way again" in line]


def test_trl_1098():
    """KL went to 10 by step 150 while the reward fell: a replay of the log says when to stop."""
    rows = [  # the curve between the ends is filled in
        {"step": step, "kl": 0.02 * 500 ** (step / 150), "reward": 1 - abs(step - 50) / 100} for step in range(1, 151)
    ]
    result = replay(rows)
    assert result.decision.action == "halt"
    assert result.fired_at < 120
    assert rows[result.fired_at - 1]["kl"] < 3
    assert result.departure_step <= result.onset_step <= result.fired_at
