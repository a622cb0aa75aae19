"""Alerts out of real TRL runs, to trackers that the trainer itself has opened and closes."""

import pytest

from alert_receiver import SECRET, receiver, wandb_alerts
from kl_guard_trl import KLGuardCallback
from launch import launch
from tracked import local
from trl_runs import SetKL


def explode(step):
    """KL in the log: sound for five steps, then above the hard ceiling."""
    return None if step <= 5 else 1000.0 + step


@pytest.fixture
def service():
    with receiver() as it:
        yield it


def test_a_halt_reaches_the_wandb_run(make_trainer, tmp_path):
    """One alert is in the file of the offline run, with title, level and the path of the report."""
    with local(tmp_path / "wandb"):
        guard = KLGuardCallback()
        make_trainer([SetKL(explode), guard], report_to="wandb").train()
        (alert,) = wandb_alerts(tmp_path / "wandb")
    assert guard.halted
    assert alert.title == "KL_BLOWUP: halted at step 8"
    assert alert.level == "ERROR"
    (report,) = (tmp_path / "run" / "kl_guard" / "incidents").rglob("report.html")
    assert str(report) in alert.text


@pytest.mark.newest  # the lowest TRL is tested without trackio
def test_an_incident_reaches_the_trackio_run(fitted, tmp_path, monkeypatch):
    """The trainer closes that run before the guard's own `on_train_end`; the alert is in its database all the same."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    results, _ = launch("trackio_run.py", fitted, tmp_path / "run", "halt", "warn", processes=1)
    assert [result["action"] for result in results] == ["halt", "warn"]
    for result, title in zip(results, ("halted at step 8", "critical at step 8"), strict=True):
        halted = result["action"] == "halt"
        assert result["halted"] == halted
        (alert,) = result["alerts"]
        assert alert["title"] == f"KL_BLOWUP: {title}"
        assert alert["level"] == "error"
        assert all(report in alert["text"] for report in result["reports"])
        assert len(result["reports"]) == halted


@pytest.mark.newest
def test_one_alert_of_two_ranks(fitted, tmp_path, monkeypatch):
    """Rank 0 sends, whichever rank has seen it; what lets it in is in none of the files."""
    with receiver() as service:
        monkeypatch.setenv("KL_GUARD_ALERTS", service.url)
        results, errors = launch("two_ranks.py", "sees", fitted, tmp_path, 2)
    assert {result["seer"] for result in results} == {0, 1}
    ended = [result["ended"] for result in results if result["rank"] == 0]
    assert service.titles == [f"KL_BLOWUP: halted at step {step}" for step in ended]
    assert SECRET not in errors
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_going_back_is_told(make_trainer, service, tmp_path):
    """A run that goes back, blows up again and is halted: one alert for each, all sent when `train` returns."""
    told = []
    guard = KLGuardCallback(action="rollback", max_rollbacks=1, alerts=[service.url], on_incident=told.append)
    trainer = make_trainer([SetKL(explode), guard], save_strategy="steps", save_steps=2, max_steps=20)
    guard.attach(trainer)
    trainer.train()
    assert len(guard.rollbacks) == 1
    assert guard.halted
    first, last = (decision.reason.step for decision in (guard.rollbacks[0], guard.decision))
    expected = [f"KL_BLOWUP: going back at step {first}", f"KL_BLOWUP: halted at step {last}"]
    assert service.titles == expected
    assert [incident.title for incident in told] == expected
    assert [incident.attempt for incident in told] == [0, 1]
    assert all(incident.report.is_file() for incident in told)


def test_wrong_alerts_are_refused_where_they_are_set():
    """Not in the night."""
    with pytest.raises(ValueError, match="alerts: entry 1 of 1"):
        KLGuardCallback(alerts=["nosuch://x"])
    with pytest.raises(TypeError, match="on_incident must be"):
        KLGuardCallback(on_incident=7)
