"""The journal: append-only, torn lines tolerated, a run rebuilt from it, a fresh start kept apart."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_guard import GuardConfig, KLGuard
from kl_guard.journal import Journal, encode, read_journal
from kl_guard.memory import recall
from streams import blow_up, holed_series


def feed(guard, values, start=1):
    """Observe values at consecutive steps; return the last decision."""
    return [guard.observe(step, value) for step, value in enumerate(values, start=start)][-1]


def journal_of(tmp_path):
    return tmp_path / "kl_guard" / "journal.jsonl"


def test_nan_is_written_as_text():
    """Bare NaN is not JSON."""
    line = encode({"a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": float("-inf")}})
    assert json.loads(line) == {"a": "nan", "b": ["inf", 1.0], "c": {"d": "-inf"}}


def test_every_observation_is_on_disk_at_once(tmp_path):
    """A killed process loses nothing that was observed."""
    guard = KLGuard(output_dir=tmp_path)
    for step in range(1, 6):
        guard.observe(step, 0.1 * step, kl_max=float("inf"))
        records, notes = read_journal(journal_of(tmp_path))
        assert records[-1]["step"] == step
        assert not notes


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_last_line_is_dropped_with_a_note(tmp_path, cut):
    """Cut anywhere in the last line: what stands before is used, and what comes after is whole again."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    feed(guard, [0.02] * 10)
    guard.close()
    path = journal_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = KLGuard(output_dir=tmp_path, announce=False)
    again.resumed(10)
    assert len(again.history) >= 9 - cut // len(whole.splitlines()[-1])
    again.observe(11, 0.02)
    again.close()
    records, notes = read_journal(path)
    assert records[-1] == {"type": "observation", "attempt": 0, "step": 11, "kl_mean": 0.02, "window": 1}
    assert len(notes) <= 1


def test_garbage_in_the_middle_costs_one_line(tmp_path, caplog):
    """Bytes that are no record are left out, and said."""
    guard = KLGuard(output_dir=tmp_path)
    feed(guard, [0.02] * 5)
    guard.close()
    with journal_of(tmp_path).open("ab") as file:
        file.write(b'\x00\xff garbage\n[1, 2]\n"text"\n{"type": 3}\n{"type": "observation"}\n')
    again = KLGuard(output_dir=tmp_path)
    again.resumed(5)
    assert len(again.history) == 5
    assert "line 7" in caplog.text


def without_companions(finding):
    """A finding without the names of other conditions that hold, of which one may be about a resume."""
    return replace(finding, evidence={name: v for name, v in finding.evidence.items() if name != "companions"})


@given(holed_series(), st.integers(0, 200))
def test_a_resumed_run_says_what_an_uninterrupted_one_says(tmp_path_factory, values, split):
    """Killed after any step and resumed there in a new process: the same findings and decisions after it.

    Without a grace, in which engines recover after a resume and nothing acts.
    """
    folder = tmp_path_factory.mktemp("run")
    config = GuardConfig(action="warn", grace=0)
    straight, first = KLGuard(config, announce=False), KLGuard(config, output_dir=folder, announce=False)
    for step, value in enumerate(values[:split], start=1):
        straight.observe(step, value)
        first.observe(step, value)
    first.close()
    second = KLGuard(config, output_dir=folder, announce=False)
    second.resumed(min(split, len(values)))
    for step, value in enumerate(values[split:], start=split + 1):
        a, b = straight.observe(step, value), second.observe(step, value)
        said = [f for f in b.findings if f.signature != "REFERENCE_RESET"]  # which is about the resume itself
        assert [without_companions(f) for f in a.findings] == [without_companions(f) for f in said]
        assert straight.level == second.level
    second.close()


def test_resume_at_an_earlier_step_truncates(tmp_path):
    """The run goes on from step 30 of 60: baseline kept, what came later gone, for good."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    assert feed(guard, blow_up(start=40, length=60)).action == "halt"
    run_id = guard.run_id
    guard.close()
    for _ in range(2):  # a second resume reads what the first one wrote
        again = KLGuard(output_dir=tmp_path, announce=False)
        again.resumed(30)
        assert (again.run_id, list(again.history.steps)) == (run_id, list(range(1, 31)))
        assert feed(again, [0.02] * 5, start=31).action == "continue"
        again.close()
    assert list(recall(read_journal(journal_of(tmp_path))[0]).history.steps) == list(range(1, 36))


def test_the_budget_survives_a_restart(tmp_path):
    """Attempt and rollbacks live in the journal, not in a checkpoint."""
    config = GuardConfig(action="rollback", max_rollbacks=1, grace=0)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "weights").write_text("w")
    guard = KLGuard(config, output_dir=tmp_path, announce=False)
    feed(guard, [0.02] * 20)
    guard.checkpoint_saved(20, tmp_path / "checkpoint-20")
    assert feed(guard, blow_up()[20:], start=21).action == "rollback"
    guard.rolled_back(20)
    guard.close()
    again = KLGuard(config, output_dir=tmp_path, announce=False)
    again.resumed(20)
    assert again.attempt == 1
    assert [c.step for c in again.checkpoints] == [20]
    decision = feed(again, blow_up(start=60, length=100)[20:], start=21)
    assert decision.action == "halt"
    assert "used up" in decision.note


def test_a_fresh_start_in_a_used_folder_counts_nothing_of_the_old_run(tmp_path):
    """New run id, new journal; the old one is kept under its id."""
    old = KLGuard(output_dir=tmp_path, announce=False)
    feed(old, blow_up())
    old.close()
    new = KLGuard(output_dir=tmp_path, announce=False)
    new.observe(1, 0.02)
    assert new.run_id != old.run_id
    assert len(new.history) == 1
    assert not new.findings
    new.close()
    kept = tmp_path / "kl_guard" / f"journal-{old.run_id}.jsonl"
    assert len(recall(read_journal(kept)[0]).history) == 80
    assert len(recall(read_journal(journal_of(tmp_path))[0]).history) == 1


def test_without_a_journal_the_log_history_is_used(tmp_path):
    """The trainer's own history gives the baseline; rows that cannot be read are one warning."""
    rows = [{"step": s, "kl": 0.02, "loss": 0.1, "epoch": 0.1} for s in range(1, 41)]
    guard = KLGuard(output_dir=tmp_path, announce=False)
    guard.resumed(40, history=[*rows, {"step": "x", "kl": 0.1}])
    assert len(guard.history) == 40
    assert feed(guard, blow_up(start=1, length=20), start=41).action == "halt"
    guard.close()
    again = KLGuard(output_dir=tmp_path, announce=False)
    again.resumed(60)
    assert len(again.history) == 60


def test_resume_without_any_memory_is_said(tmp_path, caplog):
    """The baseline begins anew, and the first KL is no reference mismatch."""
    guard = KLGuard(output_dir=tmp_path)
    guard.resumed(500)
    assert "without a journal or log history" in caplog.text
    assert not guard.observe(501, 0.4).findings


OTHER = """
import sys
from kl_guard import KLGuard
guard = KLGuard(output_dir=sys.argv[1])
guard.observe(1, 0.02)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_guard_of_another_process_in_the_folder(tmp_path, caplog):
    """Two writers would spoil each other's memory: the second one watches without files."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "ready\n"
        second = KLGuard(output_dir=tmp_path)
        second.checkpoint_saved(1, tmp_path)
        assert feed(second, blow_up()).action == "halt"
        assert "another guard is writing" in caplog.text
        assert len(recall(read_journal(journal_of(tmp_path))[0]).history) == 1
        assert not (tmp_path / "kl_guard" / "pins").exists()
        assert not (tmp_path / "kl_guard" / "incidents").exists()
    finally:
        other.communicate("\n")


def test_a_newer_guard_of_the_same_process_takes_over(tmp_path):
    """What an interrupted run left behind, in a notebook, must not lock the next one out."""
    first = KLGuard(output_dir=tmp_path, announce=False)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "weights").write_text("w")
    feed(first, [0.02] * 5)
    first.checkpoint_saved(5, tmp_path / "checkpoint-5")
    first.checkpoints._pins.wait()
    first.observe(6, 0.02)
    second = KLGuard(output_dir=tmp_path, announce=False)
    second.resumed(5)
    second.observe(6, 0.03)
    first.observe(7, 0.02)  # still alive, but no longer the one that writes
    second.close()
    memory = recall(read_journal(journal_of(tmp_path))[0])
    assert list(memory.history.steps) == [1, 2, 3, 4, 5, 6]
    assert memory.history[-1].kl_mean == 0.03
    assert second.run_id == first.run_id
    assert second.checkpoints.newest_before(6).path == str(tmp_path / "kl_guard" / "pins" / "step-5")


@pytest.mark.parametrize(("after", "warned"), [(-2, False), (5, True)])
def test_a_resume_into_the_trouble_is_said(tmp_path, caplog, after, warned):
    """The newest checkpoint is what `resume_from_checkpoint=True` takes; it may be from after the departure."""
    guard = KLGuard(output_dir=tmp_path)
    decision = feed(guard, blow_up(start=40))
    guard.close()
    KLGuard(output_dir=tmp_path).resumed(decision.reason.departure_step + after)
    assert ("an older checkpoint is from before it" in caplog.text) == warned


def test_a_disk_that_refuses_and_then_takes_lines_again(tmp_path, caplog, monkeypatch):
    """Said once; watching goes on; nothing is lost once the disk is back."""
    guard = KLGuard(output_dir=tmp_path)
    feed(guard, [0.02] * 3)
    real = os.write

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kl_guard.journal.os.write", full)
    feed(guard, [0.02] * 5, start=4)
    monkeypatch.setattr("kl_guard.journal.os.write", lambda fd, data: real(fd, data[:7]))
    guard.observe(9, 0.02)
    monkeypatch.setattr("kl_guard.journal.os.write", real)
    guard.observe(10, 0.02)
    complaints = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(complaints) == 1
    assert "cannot write" in complaints[0].getMessage()
    assert list(recall(read_journal(journal_of(tmp_path))[0]).history.steps) == list(range(1, 11))


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    """A file stands where the folder should be: said once, decisions as ever."""
    (tmp_path / "kl_guard").write_text("in the way")
    guard = KLGuard(output_dir=tmp_path)
    assert feed(guard, blow_up()).action == "halt"
    assert caplog.text.count("cannot write") == 1
    assert not guard.blind


def test_reading_and_writing_alone(tmp_path):
    """The journal as such: write, close, read."""
    journal = Journal(tmp_path / "deep" / "er")
    assert list(journal.read()) == []
    journal.write({"type": "run", "run_id": "a/../b"}, sync=True)
    journal.archive()
    journal.close()
    assert [p.name for p in Path(tmp_path / "deep" / "er").glob("journal*")] == ["journal-ab.jsonl"]


def test_rolled_back_first_in_a_process_keeps_the_journal(tmp_path):
    """The budget is in it: the second process goes on where the first one was."""
    first = KLGuard(output_dir=tmp_path, announce=False)
    feed(first, [0.01] * 29)
    first.close()
    second = KLGuard(output_dir=tmp_path, announce=False)
    second.rolled_back(10)
    feed(second, [0.01] * 9, start=11)
    second.close()
    third = KLGuard(output_dir=tmp_path, announce=False)
    third.resumed(19)
    assert (third.run_id, third.attempt, list(third.history.steps)) == (first.run_id, 1, list(range(1, 20)))
    assert not list((tmp_path / "kl_guard").glob("journal-*"))


def test_grace_survives_a_restart(tmp_path):
    """Killed in the middle of it, what is resumed has a grace of its own: engines may need it."""
    config = GuardConfig(action="rollback", hard_ceiling=5.0, sustain=1)
    guard = KLGuard(config, output_dir=tmp_path, announce=False)
    feed(guard, [0.02] * 30)
    guard.rolled_back(20)
    feed(guard, [0.02] * 2, start=21)
    guard.close()
    again = KLGuard(config, output_dir=tmp_path, announce=False)
    again.resumed(22)
    assert [again.observe(step, 50.0).action for step in range(23, 29)] == ["continue"] * 5 + ["halt"]


@pytest.mark.parametrize("kept", [[], range(61, 70)])
def test_a_journal_without_the_steps_needed_is_completed_from_the_log_history(tmp_path, kept):
    """Rows that were used are journaled, so that the resume of the resume has them too."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    guard.checkpoint_saved(1, tmp_path)
    for step in kept:
        guard.observe(step, 0.1)
    guard.close()
    rows = [{"step": s, "kl": 0.02, "loss": 0.1} for s in range(1, 51)]
    for history in (rows, None):
        again = KLGuard(output_dir=tmp_path, announce=False)
        again.resumed(50, history=history)
        assert len(again.history) == 50
        again.close()


def test_a_record_that_no_array_can_hold_is_left_out(tmp_path):
    """A step of 1e30 in a journal costs that line only."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    feed(guard, [0.02] * 5)
    guard.close()
    with journal_of(tmp_path).open("a") as file:
        file.write('{"type": "observation", "step": 1e30, "kl_mean": 1}\n{"type": "finding", "finding": [1]}\n')
        file.write('{"type": "observation", "step": 6, "window": 1e30, "kl_mean": 1}\n' + "[" * 100_000 + "\n")
    again = KLGuard(output_dir=tmp_path, announce=False)
    again.resumed(9)
    assert len(again.history) == 5


def test_what_the_disk_refused_is_tried_once_more_at_the_end(tmp_path, monkeypatch):
    """The disk has space again just before the guard closes."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    guard.observe(1, 0.02)
    with monkeypatch.context() as patch:
        patch.setattr("kl_guard.journal.os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        feed(guard, [0.02] * 8, start=2)
    guard.close()
    assert len(recall(read_journal(journal_of(tmp_path))[0]).history) == 9


def test_finding_and_decision_are_one_write(tmp_path, monkeypatch):
    """A process killed between them would leave a trouble that the next one knows of and does nothing about."""
    written = []
    write = os.write

    def spy(file, data):
        written.append(bytes(data))
        return write(file, data)

    monkeypatch.setattr(os, "write", spy)
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    step = 0
    while not guard.decision:
        step += 1
        guard.observe(step, 0.02 * 1.6 ** max(0, step - 30))
    (told,) = [data for data in written if b'"decision"' in data]
    kinds = [json.loads(line)["type"] for line in told.splitlines() if line]
    assert kinds == ["finding", "decision"]
    assert guard.decision.reason.signature == "KL_BLOWUP"
