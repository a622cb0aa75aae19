"""What is wrong with a real run is called by its name; a sound run is left in peace."""

import pytest

from wrong_runs import KINDS, recognised, run, spared, story, warnings

pytestmark = pytest.mark.newest  # works on both; once is enough
SEEDS = range(10)
ENOUGH = 8  # of ten seeds
STEPS = {  # that do for one seed
    "dropout": 4,
    "random reference": 3,
    "changing reference": 12,
    "end of sequence": 5,
    "no penalty": 60,
    "raised learning rate": 40,
    "padding": 4,
    "odd tokens": 18,
    "adapter": 3,
    "entropy collapse": 25,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_cause_is_the_right_one(kind, fitted, tmp_path):
    """One run of each kind that is made wrong on purpose."""
    callback = run(kind, fitted, tmp_path, seed=0, max_steps=STEPS[kind])
    assert recognised(kind, callback), story(callback)


def test_the_start_says_what_spoils_the_kl(fitted, tmp_path, caplog):
    """Also where it is too little for a finding."""
    run("dropout", fitted, tmp_path, seed=0, max_steps=1)
    assert any("dropout is on while log-probs are computed, so KL holds its noise" in r.message for r in caplog.records)


def test_nothing_is_said_of_a_healthy_run(fitted, tmp_path):
    """No finding of severity warn or above."""
    callback = run("healthy", fitted, tmp_path, seed=0)
    assert not warnings(callback), story(callback)


def test_what_the_policy_has_learnt_is_no_fault_of_the_reference(fitted, tmp_path):
    """Policy and reference began equal: no cause says that they are scored differently, wherever KL sits later."""
    callback = run("held", fitted, tmp_path, seed=2)  # KL comes to sit on the word that the reward asks for
    causes = [cause.name for finding in callback.guard.findings for cause in finding.causes]
    assert spared(callback), story(callback)
    assert not [name for name in causes if "scored" in name], story(callback)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_cause_is_right_in_eight_of_ten(kind, fitted, tmp_path):
    """Ten seeds of each kind that is made wrong on purpose."""
    stories = {}
    for seed in SEEDS:
        callback = run(kind, fitted, tmp_path / str(seed), seed)
        if not recognised(kind, callback):
            stories[seed] = story(callback)
    assert len(SEEDS) - len(stories) >= ENOUGH, stories


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "calm"), [("healthy", lambda callback: not warnings(callback)), ("held", spared)])
def test_sound_runs_are_left_in_peace(kind, calm, fitted, tmp_path):
    """Ten healthy seeds without a warning; ten of a task that only a penalty holds, none of them halted."""
    stories = {}
    for seed in SEEDS:
        callback = run(kind, fitted, tmp_path / str(seed), seed)
        if not calm(callback):
            stories[seed] = story(callback)
    assert not stories
