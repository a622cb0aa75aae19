"""What goes wrong with alerts: one warning, no delay, no exception, no secret."""

import logging
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from alert_receiver import SECRET, VALUES, dripping, receiver, run
from kl_guard import KLGuard
from kl_guard.alerts import Alerts, lanes
from kl_guard.alerts.lanes import MOST

HERE = Path(__file__).parent.parent  # where alert_receiver is


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "an alert" in r.getMessage()]


def nothing_secret(caplog, *folders):
    """Neither in what was logged, at whatever level, nor in a file."""
    assert SECRET not in caplog.text
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("failing", ["refused", "status"])
def test_a_failure_is_one_warning(tmp_path, caplog, failing):
    """A service that is not there, or says no: named by its kind alone, once, while others get theirs."""
    caplog.set_level(1)
    told = []
    with receiver(403) as wrong, receiver() as right:
        port = wrong.port if failing == "status" else 1
        bad = wrong.url.replace(str(wrong.port), str(port))
        guard = KLGuard(output_dir=tmp_path, alerts=[bad, bad, right.url], on_incident=told.append)
        run(guard)
        guard.close()
    assert len(right.posts) == len(told) == 1
    (warning,) = warnings_of(caplog)
    assert warning == (
        "kl-guard: an alert by JSON was not sent (the service refused it or could not be reached); training goes on, "
        "this is said once"
    )
    nothing_secret(caplog, tmp_path)


def test_no_secret_anywhere(tmp_path, caplog):
    """Sent with success at the lowest level of logging: not in logs, files, or any repr."""
    caplog.set_level(1)
    with receiver() as service:
        guard = KLGuard(output_dir=tmp_path, alerts=[service.url])
        run(guard)
        guard.close()
    assert f"/{SECRET}/" in service.paths[0]  # it was in the URL, and used
    nothing_secret(caplog, tmp_path)
    assert SECRET not in f"{guard!r} {guard._alerts!r} {guard.config!r} {guard.decision!r}"
    assert "JSON" in repr(guard._alerts)


def test_others_log_as_before(caplog):
    """Only what is logged while a URL is handled is dropped, and only by that thread."""
    caplog.set_level(1)
    with receiver() as service:
        Alerts([service.url])
    logging.getLogger("apprise").info("not of ours")
    assert "not of ours" in caplog.text


def test_on_incident_that_raises(tmp_path, caplog):
    """Told by its type and place, since the text may hold a secret; the halt stands."""

    def broken(incident):
        raise ConnectionError(f"https://hooks.example/{SECRET}")

    guard = KLGuard(output_dir=tmp_path, on_incident=broken)
    assert run(guard).action == "halt"
    guard.close()
    (warning,) = warnings_of(caplog)
    assert "an alert by on_incident was not sent (ConnectionError in " in warning
    assert "test_faults.py, line " in warning
    assert not guard.blind
    nothing_secret(caplog, tmp_path)


def test_a_service_that_hangs(tmp_path, caplog):
    """Observing does not wait for it, the others get theirs, and closing waits no longer than it was told to."""
    with dripping() as slow, receiver() as service:
        guard = KLGuard(output_dir=tmp_path, alerts=[slow.url, service.url])
        for step, value in enumerate(VALUES, start=1):
            begun = time.monotonic()
            decision = guard.observe(step=step, kl_mean=value)
            took = time.monotonic() - begun
            if decision:
                break
        assert took < 2.0  # the report is written in it; the service would take for ever
        begun = time.monotonic()
        guard._alerts.close(1.0)
        assert 0.9 < time.monotonic() - begun < 3.0
        assert len(service.posts) == 1
        begun = time.monotonic()
        guard.close()
        assert time.monotonic() - begun < 1.0  # it is not waited for twice
    (warning,) = warnings_of(caplog)
    assert "an alert by JSON was not sent (no answer within 1 s)" in warning


@pytest.mark.parametrize("ends", ["", "guard.close()", "raise RuntimeError('the loop failed')"])
def test_the_process_ends_in_time(tmp_path, ends):
    """With one service that hangs and one that answers: the alert is out, and the process when its time is over."""
    assert lanes.SECONDS == 10.0
    code = textwrap.dedent("""
        import sys
        from kl_guard.alerts import lanes
        lanes.SECONDS = 0.7
        from alert_receiver import run
        from kl_guard import KLGuard
        guard = KLGuard(output_dir=sys.argv[1], alerts=sys.argv[2:])
        assert run(guard).action == "halt"
    """)
    with dripping() as slow, receiver() as service:
        command = [sys.executable, "-c", code + ends, str(tmp_path), slow.url, service.url]
        begun = time.monotonic()
        process = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=60, check=False)
        took, errors = time.monotonic() - begun, process.stderr
        assert len(service.posts) == 1
    assert process.returncode == ("raise" in ends), errors
    assert 0.7 < took < 10.0  # with what it takes to start
    assert errors.count("an alert by JSON was not sent (no answer within 0.7 s)") == 1
    assert SECRET not in errors


def test_too_many_for_a_target_that_hangs(caplog):
    """The queue has an end; what is too much is dropped, and said once."""
    hold, told = threading.Event(), []
    alerts = Alerts([], on_incident=lambda it: (hold.wait(20), told.append(it)))
    guard = KLGuard(alerts=alerts)
    run(guard)
    for _ in range(3 * MOST):
        guard._memory.alerted.clear()
        guard._alert(guard.decision, guard.decision.reason)
    hold.set()
    guard.close()
    assert len(told) == MOST
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (["nosuch://{s}/"], ValueError, "alerts: entry 1 of 1, which begins with 'nosuch://', is no URL of a service"),
        (["json://localhost", "slack://{s}"], ValueError, "entry 2 of 2, which begins with 'slack://', is no URL"),
        (["hooks.slack.com/{s}"], ValueError, "entry 1 of 1 is no URL of a service that apprise knows"),
        ([f"{SECRET}://x"], ValueError, "entry 1 of 1 is no URL of a service that apprise knows"),
        ([""], ValueError, "entry 1 of 1 is no URL of a service that apprise knows"),
        ([7], TypeError, "entry 1 of 1 must be an apprise URL, got int"),
        (7, TypeError, "alerts must be a list of apprise URLs, or None, got int"),
    ],
)
def test_wrong_urls_are_refused_where_they_are_set(caplog, given, error, message):
    """Without what they hold, in message and log."""
    caplog.set_level(1)
    given = [url.replace("{s}", SECRET) if isinstance(url, str) else url for url in given] if given != 7 else given
    with pytest.raises(error) as caught:
        KLGuard(alerts=given)
    assert message in str(caught.value)
    assert SECRET not in str(caught.value) + caplog.text


def test_wrong_urls_of_the_environment(monkeypatch):
    """The message says where they come from."""
    monkeypatch.setenv("KL_GUARD_ALERTS", f"nosuch://{SECRET}")
    with pytest.raises(ValueError, match="KL_GUARD_ALERTS: entry 1 of 1") as caught:
        KLGuard()
    assert SECRET not in str(caught.value)


def test_on_incident_must_be_callable():
    """Said where it is set."""
    with pytest.raises(TypeError, match="on_incident must be a function of one argument, or None, got 'print'"):
        KLGuard(on_incident="print")


def test_without_apprise(monkeypatch):
    """One line that says what to install; without URLs it is not needed."""
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ModuleNotFoundError, match=r"alerts by URL need .* pip install 'kl-guard\[alerts\]'"):
        KLGuard(alerts=["json://localhost"])
    monkeypatch.setenv("KL_GUARD_ALERTS", "json://localhost")
    with pytest.raises(ModuleNotFoundError, match="KL_GUARD_ALERTS: alerts by URL need"):
        KLGuard()
    KLGuard(alerts=[])


def test_nothing_is_imported_for_nothing():
    """Neither apprise nor a tracker, in a run that is halted and has no alerts."""
    code = (
        "import sys\nfrom alert_receiver import run\nfrom kl_guard import KLGuard\n"
        "guard = KLGuard(); assert run(guard); guard.close()\n"
        "print(sorted({'apprise', 'wandb', 'trackio', 'requests'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE)
    assert done.stdout.strip() == "[]"


def test_pickled_before_training(service):
    """As frameworks do that start processes of their own."""
    guard = KLGuard(alerts=pickle.loads(pickle.dumps(Alerts([service.url]))))
    run(guard)
    guard.close()
    assert len(service.posts) == 1
