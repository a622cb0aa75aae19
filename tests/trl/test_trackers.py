"""What trackers show of a run, read back from their files: every log, with the values that the guard saw."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import tracked
from kl_guard_trl import KLGuardCallback
from trl_runs import SetKL, training_logs

TRACKERS = ["tensorboard", "wandb", *(["trackio"] if find_spec("trackio") else [])]  # not there with the lowest TRL


@pytest.fixture
def run(make_trainer, tmp_path):
    """Train with all trackers on; return guard, trainer and what each tracker shows."""

    def train(*callbacks, guard=None, **arguments):
        guard = guard or KLGuardCallback()
        with tracked.local(tmp_path):
            trainer = make_trainer([*callbacks, guard], report_to=TRACKERS, **arguments)
            guard.attach(trainer)
            trainer.train()
            shown = {
                "tensorboard": tracked.tensorboard(tmp_path),
                "wandb": tracked.wandb(tmp_path, "train/global_step"),
            }
            if "trackio" in TRACKERS:
                shown["trackio"] = tracked.trackio("huggingface", "train/global_step")
        return guard, trainer, shown

    return train


def test_a_healthy_run_is_shown(run, tmp_path):
    """Each log, each figure: the mean of the logging window, of maxima the largest."""
    guard, _, shown = run(max_steps=6, logging_steps=2)
    steps = tracked.observed(tmp_path / "run")
    expected = [tracked.window(steps, first, first + 1, level=0.0) for first in (1, 3, 5)]
    assert expected[-1][1]["kl_mean"] > 0
    assert expected[-1][1].keys() == {"level", "spikes", *tracked.MEANS, *tracked.LARGEST}
    for tracker, rows in shown.items():
        assert rows == tracked.close(expected), tracker
    assert not guard.halted


def test_the_step_of_a_halt_is_shown(run, tmp_path):
    """Due to be logged or not, once, with loss and learning rate, the reason and the level that says so."""
    guard, trainer, shown = run(SetKL(lambda step: 1000.0 if step >= 4 else 0.01), logging_steps=5)
    assert guard.halted
    assert trainer.state.global_step == 6
    steps = tracked.observed(tmp_path / "run")
    expected = [tracked.window(steps, 1, 5, level=0.0), tracked.window(steps, 6, 6, level=2.0)]
    assert expected[-1][1]["kl_mean"] == 1000.0
    for tracker, rows in shown.items():
        assert rows == tracked.close(expected), tracker
    assert [row["step"] for row in training_logs(trainer)] == [5, 6]


def test_going_back_is_shown_in_one_run(run, tmp_path):
    """The step that it goes back from, and then the steps anew."""
    guard = KLGuardCallback(action="rollback")
    trouble = SetKL(lambda step: 1000.0 if step >= 5 and not guard.rollbacks else 0.01)
    _, trainer, shown = run(trouble, guard=guard, max_steps=8, logging_steps=4, save_strategy="steps", save_steps=1)
    (decision,) = guard.rollbacks
    back = decision.checkpoint.step
    assert (decision.reason.step, trainer.state.global_step) == (7, 8)
    before, after = (tracked.observed(tmp_path / "run", attempt) for attempt in (0, 1))
    expected = [
        tracked.window(before, 1, 4, level=0.0),
        tracked.window(before, 5, 7, level=2.0),
        tracked.window(after, back + 1, 4, level=0.0),
        tracked.window(after, 5, 8, level=0.0),
    ]
    for tracker, rows in shown.items():
        assert rows == tracked.close(expected), tracker


def test_the_level_is_shown_between_probes(run, tmp_path):
    """In every log; what was not measured is left out."""
    _, _, shown = run(guard=KLGuardCallback(probe="auto", probe_every=2), beta=0.0, max_steps=4)
    steps = tracked.observed(tmp_path / "run")
    expected = [tracked.window(steps, step, step, level=0.0) for step in range(1, 5)]
    assert [set(row) - {"level", "spikes"} for _, row in expected] == [{*tracked.MEANS, *tracked.LARGEST}, set()] * 2
    for tracker, rows in shown.items():
        assert rows == tracked.close(expected), tracker


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_nothing_is_logged_where_nothing_is_to_be(make_trainer, strategy):
    """The log of a halt is left out with logging_strategy="no"."""
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(lambda step: 1000.0), guard], logging_strategy=strategy, logging_steps=50)
    guard.attach(trainer)
    trainer.train()
    assert guard.halted
    assert len(training_logs(trainer)) == (strategy == "steps")
