"""Alerts to trackers whose run is open, in loops that close it the moment that the guard has decided."""

import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from alert_receiver import VALUES, run, wandb_alerts
from kl_guard import GuardConfig, KLGuard, replay
from kl_guard.alerts import trackers
from tracked import local

HERE = Path(__file__).parent.parent  # where alert_receiver is


@pytest.mark.filterwarnings("default")  # what W&B warns of is its own
def test_wandb_closed_at_once(tmp_path):
    """The alert is in the run's file, whoever is faster; a run that is closed gets none, and a replay sends none."""
    with local(tmp_path):
        import wandb

        with wandb.init(project="alerts"):
            assert replay(VALUES).decision.action == "halt"
            guard = KLGuard(output_dir=tmp_path / "out")
            assert run(guard).action == "halt"
        guard.close()
        (alert,) = wandb_alerts(tmp_path)
        assert trackers.open_runs() == {}
    assert alert.title.startswith("KL_BLOWUP: halted at step ")
    assert alert.level == "ERROR"
    assert "report.html" in alert.text


def test_trackio_closed_at_once(tmp_path):
    """In a process of its own, since where trackio keeps its data is settled when it is imported."""
    code = textwrap.dedent("""
        import sys, trackio
        from alert_receiver import run
        from kl_guard import KLGuard
        guard = KLGuard(output_dir=sys.argv[1])
        trackio.init(project="alerts", embed=False, auto_log_gpu=False)
        trackio.log({"kl": 0.1})  # a run without any is not listed
        assert run(guard).action == "halt"
        trackio.finish()
        from trackio.api import Api
        print([(a["level"], a["title"]) for r in Api().runs("alerts") for a in r.alerts()])
    """)
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[('error', 'KL_BLOWUP: halted at step " in done.stdout
    assert done.stdout.count("KL_BLOWUP: halted") == 2  # trackio itself prints it once


class HangingRun:
    """A run whose service has stopped to answer."""

    def alert(self, **_):
        time.sleep(30)


def test_a_tracker_that_hangs(monkeypatch, caplog):
    """A halt gives it a second; training is not held up any longer."""
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=HangingRun()))
    guard = KLGuard()
    begun = time.monotonic()
    assert run(guard).action == "halt"
    assert time.monotonic() - begun < 3.0
    guard._alerts.close(0.1)
    assert "an alert by wandb was not sent (no answer within 0.1 s)" in caplog.text


def test_a_finding_that_stops_nothing_waits_for_no_tracker(monkeypatch):
    """The run goes on, so there is no hurry."""
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=HangingRun()))
    guard = KLGuard(GuardConfig(action="warn"))
    begun = time.monotonic()
    run(guard)
    assert time.monotonic() - begun < 0.9
    guard._alerts.close(0.1)


@pytest.mark.parametrize("module", [None, types.SimpleNamespace(), types.SimpleNamespace(run=None)])
def test_nothing_to_send_to(monkeypatch, module):
    """Not imported, half imported, no run."""
    for name in trackers.NAMES:
        monkeypatch.setitem(sys.modules, name, module)
    assert trackers.open_runs() == {}
