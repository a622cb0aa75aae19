"""Alerts out of a real Lightning run."""

import pytest

from alert_receiver import SECRET, receiver
from kl_guard_lightning import KLGuardCallback
from lightning_runs import Policy, loader, trainer_of


def test_a_halt_is_told(tmp_path):
    """By URL and function; it is out when `fit` returns, and nothing secret is in a file."""
    told = []
    with receiver() as service:
        guard = KLGuardCallback(alerts=[service.url], on_incident=told.append)
        trainer_of(tmp_path, [guard]).fit(Policy(lambda step: 1000.0 if step >= 8 else 0.01), loader())
        assert service.titles == [incident.title for incident in told] == ["KL_BLOWUP: halted at step 10"]
    assert told[0].report.is_file()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_wrong_alerts_are_refused_where_they_are_set():
    """Not in the night."""
    with pytest.raises(ValueError, match="alerts: entry 1 of 1"):
        KLGuardCallback(alerts=["nosuch://x"])
    with pytest.raises(TypeError, match="on_incident must be"):
        KLGuardCallback(on_incident=7)
