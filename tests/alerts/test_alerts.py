"""What is sent, when, and how often: with a real service on this machine."""

import json
import os
import pickle
import threading
import time

import pytest

from alert_receiver import VALUES, receiver, run
from kl_guard import GuardConfig, Incident, KLGuard, replay
from kl_guard.alerts import Alerts
from kl_guard.alerts.incident import LONGEST_TEXT, LONGEST_TITLE, incident_of
from kl_guard.findings import Decision, Finding, Severity

FIRED = run(KLGuard(announce=False, alerts=[])).reason.step


def test_a_halt_is_told(tmp_path, service):
    """One alert: signature and step, what happened and what was done, where the report is."""
    guard = KLGuard(output_dir=tmp_path, alerts=[service.url])
    decision = run(guard)
    guard.close()
    (post,) = service.posts
    assert post["title"] == f"KL_BLOWUP: halted at step {decision.reason.step}"
    assert post["type"] == "failure"
    (report,) = tmp_path.rglob("report.html")
    for part in (
        "KL mean rose to",
        f"left its own regime at about step {decision.reason.departure_step}. The run was halted.",
        f"Likeliest cause: {decision.reason.causes[0].name}. Try: ",
        f"Report: {report}",
        f"Run {guard.run_id} in {tmp_path}",
    ):
        assert part in post["message"]


def test_a_healthy_run_is_silent(tmp_path, service):
    """And a warning, which stops nothing, is no alert."""
    guard = KLGuard(output_dir=tmp_path, alerts=[service.url])
    run(guard, VALUES[: FIRED - 1])
    assert "KL_GROWTH" in [finding.signature for finding in guard.findings]
    guard.close()
    assert service.posts == []


def test_a_critical_finding_that_nothing_acts_on(tmp_path, service):
    """Under `action="warn"` it is told once, and that nothing was done."""
    guard = KLGuard(GuardConfig(action="warn"), output_dir=tmp_path, alerts=[service.url])
    run(guard)
    guard.close()
    (post,) = service.posts
    assert post["title"] == f"KL_BLOWUP: critical at step {FIRED}"
    assert "Nothing was done about it." in post["message"]


def test_going_back_and_failing_at_it(tmp_path, service):
    """Two alerts: the run goes back; then that it was halted after all, and why."""
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"weights")
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, alerts=[service.url])
    for step, value in enumerate(VALUES, start=1):
        if step == 21:
            guard.checkpoint_saved(20, folder)
        if guard.observe(step=step, kl_mean=value):
            break
    guard.go_back()
    guard.rolled_back(20)
    guard.give_up("the weights differ from those that were saved")
    guard.close()
    assert service.titles == [f"KL_BLOWUP: going back at step {FIRED}", "rollback failed: halted at step 20"]
    assert "going back to the checkpoint of step 20." in service.posts[0]["message"]
    assert service.posts[0]["type"] == "warning"
    assert "The run was halted: the weights differ from those that were saved." in service.posts[1]["message"]


def test_what_stops_nothing_is_told_once(tmp_path, service):
    """Not again by the same process, nor by later ones that go through the same steps of the same run."""
    speaks = GuardConfig(action="warn")
    for attempt in range(3):
        guard = KLGuard(speaks, output_dir=tmp_path, alerts=[service.url])
        if attempt:
            guard.resumed(40)
        run(guard, start=41 if attempt else 1)
        guard.resumed(40)
        run(guard, start=41)
        assert "KL_BLOWUP" in [finding.signature for finding in guard.findings]
        guard.close()
    assert service.titles == [f"KL_BLOWUP: critical at step {FIRED}"]
    fresh = KLGuard(speaks, output_dir=tmp_path, alerts=[service.url])
    run(fresh)
    fresh.close()
    assert len(service.posts) == 2  # another run in the same folder


def test_each_halt_is_told(tmp_path, service):
    """Who resumed the run takes it to be training: that it was halted again, at the same step too, is news.

    Whether this process resumes or another one; but a halt that stands is told once, whatever is observed behind it.
    """
    for process in range(2):
        guard = KLGuard(output_dir=tmp_path, alerts=[service.url])
        if process:
            guard.resumed(40)
        assert run(guard, start=41 if process else 1).reason.step == FIRED
        guard.observe(step=FIRED + 1, kl_mean=50.0)
        guard.resumed(40)
        assert run(guard, start=41).reason.step == FIRED
        guard.close()
    assert service.titles == [f"KL_BLOWUP: halted at step {FIRED}"] * 4


def test_a_rollback_that_is_finished_by_another_process(tmp_path, service):
    """The decision was told by the one that was killed."""
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"weights")
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, alerts=[service.url])
    run(guard, VALUES[:20])
    guard.checkpoint_saved(20, folder)
    assert run(guard, start=21).action == "rollback"
    guard.close()
    later = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, alerts=[service.url])
    later.resumed(20)  # instead of finishing it
    assert run(later, start=21).action == "rollback"
    later.close()
    assert service.titles == [f"KL_BLOWUP: going back at step {FIRED}"]


def test_a_warning_that_would_halt_is_called_one(service):
    """With `halt_on="warn"`, where nothing is done about it."""
    guard = KLGuard(GuardConfig(action="warn", halt_on="warn"), alerts=[service.url])
    run(guard)
    guard.close()
    assert [title.partition(" at ")[0] for title in service.titles] == ["KL_GROWTH: warn", "KL_BLOWUP: critical"]


def test_what_was_not_asked_for_then_is_told_later(tmp_path, service):
    """A run that had no alerts is resumed with one."""
    before = KLGuard(output_dir=tmp_path, announce=False)  # so not through a tracker that a test left open either
    run(before)
    before.close()
    guard = KLGuard(output_dir=tmp_path, alerts=[service.url])
    guard.resumed(40)
    run(guard, start=41)
    guard.close()
    assert len(service.posts) == 1


def test_only_rank_0_sends(tmp_path, service):
    """Every rank takes the same arguments."""
    told = []
    guard = KLGuard(output_dir=tmp_path, alerts=[service.url], on_incident=told.append, rank=1)
    assert run(guard)
    guard.close()
    assert (service.posts, told) == ([], [])


def test_from_the_environment(tmp_path, monkeypatch):
    """Several, where no argument is given; an argument wins; a replay tells nobody."""
    with receiver() as one, receiver() as two:
        monkeypatch.setenv("KL_GUARD_ALERTS", f"{one.url}, {two.url}")
        guard = KLGuard()
        run(guard)
        guard.close()
        assert (len(one.posts), len(two.posts)) == (1, 1)
        silent = KLGuard(alerts=[])
        run(silent)
        silent.close()
        assert replay(VALUES).decision.action == "halt"
        assert (len(one.posts), len(two.posts)) == (1, 1)


def test_on_incident(tmp_path):
    """Called once, off the thread that observes, with everything about it; the report is there by then."""
    told = []
    guard = KLGuard(
        output_dir=tmp_path, on_incident=lambda it: told.append((it, it.report.exists(), threading.get_ident()))
    )
    decision = run(guard)
    guard.observe(step=60, kl_mean=50.0)
    guard.close()
    ((incident, existed, thread),) = told
    assert isinstance(incident, Incident)
    assert existed
    assert thread != threading.get_ident()
    assert incident.decision.action == "halt"
    assert incident.finding == decision.reason
    assert (incident.step, incident.attempt, incident.run_id) == (FIRED, 0, guard.run_id)
    assert json.loads((incident.folder / "incident.json").read_text())["run_id"] == guard.run_id


def test_a_guard_that_is_blind_says_so(service):
    """Nobody watches any more: that is told, once."""
    guard = KLGuard(alerts=[service.url])
    guard.observe(step=1, kl_mean=0.01)
    guard._panel.judge = None
    for step in range(2, 6):
        assert guard.observe(step=step, kl_mean=0.01).action == "continue"
    guard.close()
    assert service.titles == ["the guard is blind from step 2 on"]
    assert "A fault of the guard itself in observing a step" in service.posts[0]["message"]


def test_a_fault_while_writing_still_tells(tmp_path, service, monkeypatch):
    """The halt stands, and is told, whatever fails on the way to it."""
    monkeypatch.setattr("kl_guard.incidents.write", None)
    guard = KLGuard(output_dir=tmp_path, alerts=[service.url])
    assert run(guard).action == "halt"
    guard.close()
    assert service.titles[0] == f"KL_BLOWUP: halted at step {FIRED}"


def test_a_forked_process(tmp_path, service):
    """Its guard is a copy, which sends nothing, waits for nothing, and can be closed; nor does one that was pickled."""
    guard = KLGuard(output_dir=tmp_path, alerts=[service.url])
    run(guard, VALUES[:40])
    hold = threading.Event()
    guard._alerts.send(incident(), {"on_incident": lambda it: hold.wait(20)})  # its thread is at work
    child = os.fork()
    if child == 0:
        try:
            begun = time.monotonic()
            decided = run(guard, start=41)
            guard.close()
            os._exit(0 if decided and time.monotonic() - begun < 5 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    copy = pickle.loads(pickle.dumps(guard))
    assert run(copy, start=41)
    copy.close()
    assert service.posts == []
    hold.set()
    run(guard, start=41)
    guard.close()
    assert len(service.posts) == 1


def test_alerts_of_a_forked_process(service):
    """Built before the fork and used after it, as where processes of a run are forked: threads are begun anew."""
    alerts = Alerts([service.url])
    alerts.send(incident(), alerts.targets(tracked=False))
    child = os.fork()
    if child == 0:
        try:
            alerts.send(incident(), alerts.targets(tracked=False))
            alerts.close()
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    alerts.close()
    assert len(service.posts) == 2


def incident(message="kl_mean rose", **more):
    finding = Finding("KL_BLOWUP", Severity.CRITICAL, 10**30, message)
    return incident_of(
        Decision("halt", reason=finding), finding, step=10**30, attempt=0, run_id="r", output_dir=None, **more
    )


@pytest.mark.parametrize("message", ["x" * 10_000, "a\x1b[2J\x00\u202eb\n" * 500])
def test_text_is_bounded_and_plain(message):
    """Whatever a model or a log puts into it."""
    it = incident(message)
    assert len(it.title) <= LONGEST_TITLE
    assert len(it.text) <= LONGEST_TEXT
    assert all(c.isprintable() or c == "\n" for c in it.title + it.text)
    assert "Run r on " in it.text
