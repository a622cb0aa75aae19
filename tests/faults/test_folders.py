"""A folder that cannot be written, or that somebody deletes during the run."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kl_guard import GuardConfig, KLGuard
from kl_guard.journal import read_journal
from kl_guard.memory import recall, retell
from some_tokens import stats
from streams import blow_up

NOBODY = 65534
READ_ONLY = """
import logging, os, sys, tempfile
from kl_guard import GuardConfig, KLGuard
sys.path.append({tests!r})
from some_tokens import stats
with tempfile.TemporaryDirectory() as elsewhere:  # all modules are loaded that this user may not read afterwards
    before = KLGuard(output_dir=elsewhere, announce=False)
    os.mkdir(elsewhere + "/checkpoint-1")
    open(elsewhere + "/checkpoint-1/weights", "w").write("w")
    before.checkpoint_saved(1, elsewhere + "/checkpoint-1")
    before.checkpoints.wait()
    for step in range(2, 80):
        before.observe(step, tokens=stats(0.02 * 1.6 ** max(0, step - 40)))
    before.close()
    KLGuard(output_dir=elsewhere, announce=False).resumed(3)
if os.geteuid() == 0:
    os.setgid({nobody})
    os.setuid({nobody})
logging.basicConfig(format="%(message)s")
guard = KLGuard(GuardConfig(action="rollback"), output_dir={folder!r})
{resume}
for step in range({first}, 80):
    decision = guard.observe(step, tokens=stats(0.02 * 1.6 ** max(0, step - 40)))
    if step == 20:
        guard.checkpoint_saved(step, {folder!r} + "/checkpoint-20")
    if decision:
        break
print(step, decision.action, guard.blind, len(guard.history))
guard.close()
"""


def journal_of(folder):
    return folder / "kl_guard" / "journal.jsonl"


def feed(guard, values, start=1):
    for step, value in enumerate(values, start=start):
        decision = guard.observe(step, tokens=stats(value))
    return decision


def as_nobody(folder, *, resume="", first=1):
    """Watch a run in a folder that this user may read, not write."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in [*folder.parents][:-2]:
        if parent.stat().st_uid == os.getuid() and parent != Path("/tmp"):  # noqa: S108
            parent.chmod(parent.stat().st_mode | 0o055)
    script = READ_ONLY.format(
        nobody=NOBODY, tests=str(Path(__file__).parent.parent), folder=str(folder), resume=resume, first=first
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.split(), done.stderr.splitlines()


def test_a_read_only_folder(tmp_path):
    """Said once for all the guard's files; the decision is the one it would be."""
    folder = tmp_path / "run"
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "checkpoint-20" / "weights").write_text("w")
    (step, action, blind, count), said = as_nobody(folder)
    assert (action, blind, count) == ("rollback", "False", step)
    assert len([text for text in said if "cannot write" in text]) == 1
    assert len([text for text in said if "is not pinned" in text]) == 1
    assert not (folder / "kl_guard").exists()


def test_a_folder_that_became_read_only(tmp_path):
    """What is there is read, the run resumes from it, and not a byte of it changes."""
    folder = tmp_path / "run"
    guard = KLGuard(output_dir=folder, announce=False)
    feed(guard, [0.02] * 30)
    guard.close()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (step, action, blind, count), said = as_nobody(folder, resume="guard.resumed(30)", first=31)
    assert (action, blind, count) == ("halt", "False", step)
    assert len([text for text in said if "cannot write" in text and "tokens" not in text]) == 1
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_deleted_during_the_run(tmp_path, caplog):
    """It is made anew with all that was known: the next process resumes as if nothing had been."""
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path)
    twin = KLGuard(GuardConfig(action="rollback"), announce=False)
    feed(guard, [0.02] * 30), feed(twin, [0.02] * 30)
    guard.note({"dropout": "0.1"})
    (tmp_path / "checkpoint-30").mkdir()
    (tmp_path / "checkpoint-30" / "weights").write_text("w")
    guard.checkpoint_saved(30, tmp_path / "checkpoint-30")
    guard.checkpoints.wait()
    shutil.rmtree(tmp_path / "kl_guard")
    feed(guard, [0.02] * 10, start=31), feed(twin, [0.02] * 10, start=31)
    guard.close()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"kl-guard: {journal_of(tmp_path)} was deleted; it is begun anew with what this process knows"
    ]
    assert not guard.blind
    again = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path)
    again.resumed(40)
    assert again.run_id == guard.run_id
    assert list(again.history) == list(twin.history)
    assert again.checkpoints.newest_before(40).path == str(tmp_path / "checkpoint-30")
    decision = feed(again, blow_up(start=41, length=70)[40:], start=41)
    assert (decision.action, decision.checkpoint.step) == ("rollback", 30)
    assert (tmp_path / "kl_guard" / "tokens.jsonl").exists()


@pytest.mark.parametrize("name", ["journal.jsonl", "tokens.jsonl"])
def test_one_file_deleted_during_the_run(tmp_path, name):
    """The file comes again."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    feed(guard, [0.02] * 10)
    (tmp_path / "kl_guard" / name).unlink()
    feed(guard, [0.02] * 10, start=11)
    guard.close()
    assert (tmp_path / "kl_guard" / name).exists()
    assert list(recall(read_journal(journal_of(tmp_path))[0]).history.steps) == list(range(1, 21))


def test_the_whole_output_folder_deleted(tmp_path):
    """Checkpoints are gone with it, what was observed is not."""
    folder = tmp_path / "run"
    guard = KLGuard(output_dir=folder, announce=False)
    feed(guard, [0.02] * 10)
    shutil.rmtree(folder)
    feed(guard, [0.02] * 10, start=11)
    guard.close()
    assert list(recall(read_journal(journal_of(folder))[0]).history.steps) == list(range(1, 21))


def test_records_made_again_add_up_to_the_same(tmp_path):
    """Attempts, budget, findings, failures, checkpoints, changes and history of a run that was taken back."""
    guard = KLGuard(GuardConfig(action="rollback", grace=0), output_dir=tmp_path, announce=False)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "weights").write_text("w")
    feed(guard, [0.02] * 20)
    guard.checkpoint_saved(20, tmp_path / "checkpoint-20")
    step = 20
    while not guard.decision:
        step += 1
        guard.observe(step, tokens=stats(0.02 * 1.6 ** max(0, step - 40)), reward=float(step))
    guard.rolled_back(20)
    guard.changed(guard.changes_in(None))
    feed(guard, [0.03] * 40, start=21)
    guard.observe(61, float("nan"), loss=1.0)
    before = guard._memory
    before.alerted.add((0, 51, "KL_BLOWUP", "rollback"))
    after = recall([{"type": "run", "run_id": guard.run_id}, *retell(before)])
    for name in (
        "run_id",
        "attempt",
        "rollbacks",
        "findings",
        "failures",
        "changes",
        "since_rollback",
        "mid_run",
        "alerted",
    ):
        assert getattr(after, name) == getattr(before, name), name
    assert after.checkpoints == before.checkpoints
    assert str(list(after.history)) == str(list(before.history))
    assert after.returned.step == before.returned.step == 20


def test_a_file_in_the_place_of_the_folder(tmp_path, caplog):
    """Nothing can be written there: said once, pins included."""
    (tmp_path / "kl_guard").write_text("in the way")
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "weights").write_text("w")
    guard = KLGuard(output_dir=tmp_path)
    feed(guard, [0.02] * 20)
    guard.checkpoint_saved(20, tmp_path / "checkpoint-20")
    assert guard.observe(21, tokens=stats()).action == "continue"
    guard.close()
    assert not guard.blind
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([text for text in said if "cannot write" in text]) == 1
    assert len(said) <= 2
    assert (tmp_path / "kl_guard").read_text() == "in the way"
