"""Alerts out of a torch loop."""

import pytest

from alert_receiver import receiver
from kl_guard_torch import TorchGuard
from loops import Loop, trouble


def test_going_back_is_told(tmp_path):
    """A rollback, then the halt."""
    told = []
    with receiver() as service:
        loop = Loop(tmp_path, action="rollback", max_rollbacks=1, alerts=[service.url], on_incident=told.append)
        loop.run(40, trouble(12, attempts=2))
        loop.guard.close()
        assert service.titles == [incident.title for incident in told]
    assert [incident.decision.action for incident in told] == ["rollback", "halt"]
    assert [incident.attempt for incident in told] == [0, 1]


def test_wrong_alerts_are_refused_where_they_are_set():
    """Not in the night."""
    with pytest.raises(ValueError, match="alerts: entry 1 of 1"):
        TorchGuard(alerts=["nosuch://x"])
    with pytest.raises(TypeError, match="on_incident must be"):
        TorchGuard(on_incident=7)
