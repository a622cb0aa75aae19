"""Alerts out of real TRL runs, to trackers that the trainer itself has opened and closes."""

import pytest

from alert_receiver import wandb_alerts
from kl_guard_trl import KLGuardCallback
from trl_runs import SetKL


def explode(step):
    """KL in the log: sound for five steps, then above the hard ceiling."""
    return None if step <= 5 else 1000.0 + step


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch):
    """W&B without a network; its run is over after the test."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "wandb").mkdir()
    import wandb

    yield wandb
    wandb.finish()


def test_a_halt_reaches_the_wandb_run(make_trainer, tmp_path, wandb_offline):
    """One alert is in the file of the offline run, with title, level and the path of the report."""
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(explode), guard], report_to="wandb")
    trainer.train()
    assert guard.halted
    wandb_offline.finish()
    (alert,) = wandb_alerts(tmp_path / "wandb")
    assert alert.title == "KL_BLOWUP: halted at step 8"
    assert alert.level == "ERROR"
    (report,) = (tmp_path / "run" / "kl_guard" / "incidents").rglob("report.html")
    assert str(report) in alert.text


def test_a_halt_reaches_the_trackio_run(make_trainer, tmp_path):
    """The trainer closes the run before the guard's own `on_train_end`; the alert is in its database all the same."""
    # A process of its own: where trackio keeps its data is settled when it is imported.
