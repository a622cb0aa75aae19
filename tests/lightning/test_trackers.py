"""What loggers show of a run, read back from their files: the steps that are due, with the values the guard saw."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import trackio
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

import tracked
from kl_guard_lightning import KLGuardCallback, fit_with_rollback
from lightning_runs import Policy, each, loader, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*anonymous setting has no effect.*"),  # Lightning's W&B logger still gives it
]


class Trackio(Logger):
    """What a user writes who logs to trackio: Lightning has no logger for it."""

    name, version = "tiny", "0"

    def __init__(self):
        super().__init__()
        self.run = None

    @property
    @rank_zero_experiment
    def experiment(self):
        if self.run is None:
            self.run = trackio.init(project=self.name, embed=False)
        return self.run

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        self.experiment.config.update(dict(params))

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status):
        self.experiment.finish()


class Scores(Policy):
    """Returns other tokens in each step, on top of the KL that it logs."""

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(self.global_step)
        policy = -torch.rand(3, 5, generator=generator)
        reference = policy + 0.1 * torch.randn(3, 5, generator=generator)
        self.extra = {"policy_logprobs": policy, "ref_logprobs": reference, "mask": torch.ones(3, 5)}
        return super().training_step(batch, batch_idx)


def run(folder, kl, guard, fit=pl.Trainer.fit, **settings):
    """Train with all loggers on; return the trainer and what each logger shows, by the guard's count of steps."""
    with tracked.local(folder):
        loggers = [
            pl.loggers.TensorBoardLogger(folder),
            pl.loggers.WandbLogger(save_dir=folder, offline=True),
            Trackio(),
        ]
        trainer = trainer_of(folder, [guard, each(1, dirpath=folder / "saved")], logger=loggers, **settings)
        fit(trainer, Scores(kl), loader())
        shown = {
            "tensorboard": tracked.tensorboard(folder),
            "wandb": tracked.wandb(folder, "trainer/global_step"),
            "trackio": tracked.trackio("tiny", "step"),
        }
    return trainer, {name: [(step + 1, row) for step, row in rows] for name, rows in shown.items()}


def test_a_healthy_run_is_shown(tmp_path):
    """Every step that is due, each figure; Lightning counts steps from 0."""
    _, shown = run(tmp_path, lambda step: 0.01 * step, KLGuardCallback(), max_steps=6, log_every_n_steps=2)
    steps = tracked.observed(tmp_path)
    expected = [tracked.window(steps, step, step, level=0.0) for step in (2, 4, 6)]
    assert [row["kl_mean"] for _, row in expected] == pytest.approx([0.02, 0.04, 0.06])
    assert expected[-1][1].keys() == {"level", "spikes", *tracked.MEANS, *tracked.LARGEST} - {tracked.SPECIAL}
    for logger, rows in shown.items():
        assert rows == tracked.close(expected), logger


def test_the_step_of_a_halt_is_shown(tmp_path):
    """Due to be logged or not, with the level that says so."""
    guard = KLGuardCallback()
    trainer, shown = run(tmp_path, lambda step: 1000.0 if step >= 6 else 0.01, guard, log_every_n_steps=5)
    assert guard.halted
    assert trainer.global_step == 8
    steps = tracked.observed(tmp_path)
    expected = [tracked.window(steps, 5, 5, level=0.0), tracked.window(steps, 8, 8, level=2.0)]
    assert expected[-1][1]["kl_mean"] == 1000.0
    for logger, rows in shown.items():
        assert rows == tracked.close(expected), logger


def test_going_back_is_shown_in_one_run(tmp_path):
    """The step that it goes back from, and then the steps anew."""
    guard = KLGuardCallback(action="rollback")
    trainer, shown = run(
        tmp_path,
        lambda step: 1000.0 if step >= 6 and not guard.rollbacks else 0.01,
        guard,
        fit_with_rollback,
        max_steps=10,
        log_every_n_steps=5,
    )
    (decision,) = guard.rollbacks
    assert (decision.reason.step, trainer.global_step) == (8, 10)
    assert decision.checkpoint.step < 5
    before, after = (tracked.observed(tmp_path, attempt) for attempt in (0, 1))
    expected = [
        tracked.window(before, 5, 5, level=0.0),
        tracked.window(before, 8, 8, level=2.0),
        tracked.window(after, 5, 5, level=0.0),
        tracked.window(after, 10, 10, level=0.0),
    ]
    for logger, rows in shown.items():
        assert rows == tracked.close(expected), logger


def test_nothing_is_logged_where_nothing_is_to_be(tmp_path):
    """Going back with `log_every_n_steps=0`."""
    guard = KLGuardCallback(action="rollback")
    kept = pl.loggers.CSVLogger(tmp_path / "csv")
    trainer = trainer_of(tmp_path, [guard, each(1)], logger=kept, log_every_n_steps=0)
    fit_with_rollback(trainer, Policy(lambda step: 1000.0 if step >= 6 and not guard.rollbacks else 0.01), loader())
    assert len(guard.rollbacks) == 1
    assert not list((tmp_path / "csv").rglob("metrics.csv"))
