"""Files when the run goes back: what is moved, what is put in place, which checkpoint is chosen."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from checkpoint_files import checkpoint, content
from kl_guard import Checkpoint, GuardConfig, KLGuard
from kl_guard.checkpoints import Keeper, Quarantine
from kl_guard.checkpoints import pins as pins_module
from kl_guard.checkpoints.soundness import problems
from streams import blow_up


def keep(tmp_path, *steps, **kwargs):
    """A keeper with pins of checkpoints at `steps`, complete."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    for step in steps:
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step)), **kwargs))
    keeper.wait()
    return keeper


def test_later_ones_are_moved_aside_and_nothing_is_lost(tmp_path, caplog):
    """Checkpoints and pins keep their contents, under names that no trainer takes for a checkpoint's."""
    keeper = keep(tmp_path, 10, 20, 30)
    before = content(tmp_path / "checkpoint-30")
    keeper.go_back(10, attempt=2)
    aside = tmp_path / "kl_guard" / "quarantine"
    assert sorted(p.name for p in aside.iterdir()) == [
        "attempt-2-checkpoint-20",
        "attempt-2-checkpoint-30",
        "attempt-2-pin-20",
        "attempt-2-pin-30",
    ]
    assert content(aside / "attempt-2-checkpoint-30") == content(aside / "attempt-2-pin-30") == before
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-10"]
    assert caplog.text.count("4 checkpoints or pins of steps after 10 moved to") == 1
    keeper.close()


def test_names_in_quarantine_are_never_taken_twice(tmp_path):
    """What was moved there before stays."""
    quarantine = Quarantine(tmp_path / "quarantine", within=tmp_path)
    for text in ("first", "second"):
        (tmp_path / "checkpoint-5").mkdir()
        (tmp_path / "checkpoint-5" / "x").write_text(text)
        assert quarantine.take(tmp_path / "checkpoint-5", 0) is not None
    assert (tmp_path / "quarantine" / "attempt-0-checkpoint-5" / "x").read_text() == "first"
    assert (tmp_path / "quarantine" / "attempt-0-checkpoint-5-2" / "x").read_text() == "second"
    assert quarantine.take(tmp_path / "checkpoint-5", 0) is None


@pytest.mark.parametrize("path", ["../outside", "link/inside"])
def test_what_lies_elsewhere_is_left_alone(tmp_path, caplog, path):
    """Whatever a journal says; a link to another disk is moved itself, what it points to stays."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "outside" / "inside").mkdir(parents=True)
    (run / "link").symlink_to(tmp_path / "outside")
    quarantine = Quarantine(run / "quarantine", within=run)
    assert quarantine.take(run / path, 0) is None
    assert (tmp_path / "outside" / "inside").is_dir()
    assert "lies outside of" in caplog.text
    assert quarantine.take(run / "link", 0) == run / "quarantine" / "attempt-0-link"
    assert (tmp_path / "outside" / "inside").is_dir()


def test_a_folder_that_cannot_be_moved_is_said(tmp_path, caplog, monkeypatch):
    """The others are moved all the same."""
    keeper = keep(tmp_path, 10, 20, 30)
    rename = Path.rename

    def refuse(self, target):
        if self.name == "checkpoint-30":
            raise PermissionError(13, "not yours")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    keeper.go_back(10)
    assert "checkpoint-30 cannot be moved aside" in caplog.text
    assert not (tmp_path / "checkpoint-20").exists()
    keeper.close()


@pytest.mark.parametrize("links", [True, False])
def test_a_pin_is_put_back_where_rotation_took_the_original(tmp_path, monkeypatch, links):
    """Complete, by one rename; the pin itself stays."""
    keeper = keep(tmp_path, 10)
    before = content(tmp_path / "checkpoint-10")
    shutil.rmtree(tmp_path / "checkpoint-10")
    if not links:

        def no_links(*_):
            raise OSError(18, "no links here")

        monkeypatch.setattr(pins_module.os, "link", no_links)
    keeper.provide(keeper.newest_before(20), tmp_path / "checkpoint-10", 0)
    assert content(tmp_path / "checkpoint-10") == before
    assert not list(tmp_path.glob(".draft*"))
    shutil.rmtree(tmp_path / "checkpoint-10")
    assert keeper.newest_before(20).step == 10
    keeper.close()


def test_a_sound_original_is_left_and_a_damaged_one_replaced(tmp_path):
    """Damaged, it is moved aside, not deleted."""
    keeper = keep(tmp_path, 10)
    where = tmp_path / "checkpoint-10"
    inode = where.stat().st_ino
    keeper.provide(keeper.newest_before(20), where, 0)
    assert where.stat().st_ino == inode
    (where / "trainer_state.json").write_text("{}")
    keeper.provide(keeper.newest_before(20), where, 0)
    assert json.loads((where / "trainer_state.json").read_text()) == {"global_step": 10}
    assert (tmp_path / "kl_guard" / "quarantine" / "attempt-0-checkpoint-10").is_dir()
    keeper.close()


def test_a_disk_that_is_full_when_a_pin_is_put_back(tmp_path, monkeypatch, caplog):
    """Said; nothing half-made is left in the trainer's folder, and the pin can still be gone back to."""
    keeper = keep(tmp_path, 10)
    shutil.rmtree(tmp_path / "checkpoint-10")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pins_module.shutil, "copyfile", full)
    keeper.provide(keeper.newest_before(20), tmp_path / "checkpoint-10", 0)
    assert "cannot be put back" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["kl_guard"]
    assert keeper.newest_before(20).step == 10
    keeper.close()


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ({20: True, 30: False}, 40, 30),
        ({20: True, 30: False}, 60, 20),
        ({10: True, 30: False}, 40, 30),
        ({10: False, 30: False}, 40, 30),
        ({10: True, 20: False, 30: True}, 40, 30),
        ({0: True, 30: False}, 60, 30),
    ],
)
def test_exact_checkpoints_are_preferred_within_reason(tmp_path, saved, now, expected):
    """One from the middle of a generation is taken where the exact one lies more than half as far again back."""
    keeper = Keeper(None)
    for step, aligned in saved.items():
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step)), aligned=aligned))
    assert keeper.newest_before(35, now=now).step == expected


def torch_file(path, flip=False):
    """A zip archive as torch.save writes it; with a bit flipped in its content if asked for."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("data/0", os.urandom(1000))
    if flip:
        data = bytearray(path.read_bytes())
        data[500] ^= 1
        path.write_bytes(bytes(data))


def test_what_can_be_told_without_a_manifest(tmp_path):
    """Emptied, truncated and, for what torch saves, flipped bits; each with the name of the file."""
    whole = checkpoint(tmp_path, 1)
    torch_file(whole / "scheduler.pt")
    assert list(problems(whole)) == []
    weights = (whole / "model.safetensors").read_bytes()
    cases = {
        "model.safetensors": [weights[:-1], weights[:20], weights[:4], b"", b"\x10" + weights[1:]],
        "trainer_state.json": [b"", b'{"global_step": 1'],
        "scheduler.pt": [b"", (whole / "scheduler.pt").read_bytes()[:-3]],
    }
    for name, contents in cases.items():
        good = (whole / name).read_bytes()
        for spoiled in contents:
            (whole / name).write_bytes(spoiled)
            (found,) = problems(whole)
            assert found.startswith(str(whole / name))
        (whole / name).write_bytes(good)
    torch_file(whole / "scheduler.pt", flip=True)
    assert "scheduler.pt is damaged" in next(problems(whole))
    (tmp_path / "empty").mkdir()
    assert list(problems(tmp_path / "empty")) == [f"{tmp_path / 'empty'} is missing or empty"]
    assert list(problems(Path("x" * 300)))


def test_an_original_is_compared_with_the_manifest_of_a_pin_that_is_gone(tmp_path, caplog):
    """Retention let go of the pin; a flipped bit in the original is still found."""
    keeper = keep(tmp_path, *range(10, 110, 10))
    keeper.saved(Checkpoint(110, str(checkpoint(tmp_path, 110))))
    gone = {10 * k for k in range(1, 11)} - {pin.step for pin in keeper._pins.pins()}
    assert 30 in gone
    assert keeper.newest_before(31).step == 30
    path = tmp_path / "checkpoint-30" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert keeper.newest_before(31).step != 30
    assert f"{path} does not match its checksum" in caplog.text
    keeper.go_back(20)
    assert keeper._pins.manifest_of(30, tmp_path / "checkpoint-30") is None
    keeper.close()


def test_the_state_at_the_start_becomes_the_pin_itself(tmp_path):
    """It was saved for that: no second copy, and no trace where it was saved."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    start = checkpoint(tmp_path / "start", 0)
    before = content(start)
    keeper.saved(Checkpoint(0, str(start)), take=True)
    keeper.wait()
    assert not start.exists()
    found = keeper.newest_before(5)
    assert found.path == str(tmp_path / "kl_guard" / "pins" / "step-0")
    assert content(Path(found.path)) == before
    keeper.close()


def guard_with(tmp_path, config=None, *steps):
    guard = KLGuard(config or GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    for step, kl in enumerate(blow_up(), start=1):
        decision = guard.observe(step, kl)
        if decision:
            return guard, decision
        if step in (steps or (10, 20, 30, 40)):
            guard.checkpoint_saved(step, checkpoint(tmp_path, step))
    raise AssertionError("it did not fire")


def folder_of(tmp_path):
    return lambda step: tmp_path / f"checkpoint-{step}"


def test_going_back_in_the_guards_own_words(tmp_path):
    """go_back, rolled_back, changed: the files, the attempt, and what the next process knows of it."""
    guard, decision = guard_with(tmp_path)
    assert decision.action == "rollback"
    (tmp_path / "checkpoint-45").mkdir()  # saved while nobody told the guard
    target = guard.go_back(folder_of(tmp_path), {45: tmp_path / "checkpoint-45", 10: tmp_path / "checkpoint-10"})
    assert target.step == decision.checkpoint.step == 30
    guard.rolled_back(30)
    assert guard.changes is None
    changes = type(guard.changes_in(None))(0.5, 2.0)
    guard.changed(changes)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    guard.close()
    again = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    assert not again.recover()
    again.resumed(30)
    assert (again.attempt, again.changes) == (1, changes)
    assert again.changes_in(again.checkpoints.get(30)).learning_rate == 1.0
    again.close()


def test_a_decision_that_was_not_carried_out_is_found_again(tmp_path):
    """By the next process, once; a resume by hand is the user's own decision, and ends it."""
    guard, decision = guard_with(tmp_path)
    guard.close()
    again = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    assert again.recover()
    assert again.decision.action == "rollback"
    assert again.go_back(folder_of(tmp_path)).step == decision.checkpoint.step
    again.close()
    third = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    third.resumed(20)
    third.close()
    last = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    assert not last.recover()
    last.close()


def test_nothing_sound_is_left_when_going_back(tmp_path):
    """Damaged between decision and return: halt, said, and nothing is moved."""
    guard, _ = guard_with(tmp_path, None, 30)
    guard.checkpoints.wait()
    for folder in ("checkpoint-30", "kl_guard/pins/step-30"):
        (tmp_path / folder / "trainer_state.json").write_text("")
    assert guard.go_back(folder_of(tmp_path)) is None
    assert guard.decision.action == "halt"
    assert "not sound any more" in guard.decision.note
    assert (tmp_path / "checkpoint-30").is_dir()
    guard.close()
    again = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    assert not again.recover()


@pytest.mark.parametrize("action", ["halt", "warn"])
def test_without_a_rollback_decided_there_is_nowhere_to_go(tmp_path, action):
    """go_back answers None and touches nothing."""
    guard = KLGuard(GuardConfig(action=action), output_dir=tmp_path, announce=False)
    for step, kl in enumerate(blow_up(), start=1):
        guard.observe(step, kl)
    assert guard.go_back(folder_of(tmp_path)) is None
    guard.close()


def test_a_resume_by_hand_ends_a_pending_rollback(tmp_path):
    """It was never made: a later failure at the same step is the first one, and is gone back from."""
    guard, _ = guard_with(tmp_path)
    guard.close()
    again = KLGuard(GuardConfig(action="rollback", grace=0), output_dir=tmp_path, announce=False)
    again.resumed(20)
    for step, kl in enumerate(blow_up()[20:], start=21):
        decision = again.observe(step, kl)
        if decision:
            break
        if step == 30:
            again.checkpoint_saved(30, checkpoint(tmp_path, 30))
    assert decision.action == "rollback", decision.note
    again.close()


def test_grace_is_not_used_up_by_restarts(tmp_path):
    """Five observations after the rollback, however often the process was started again at its step."""
    guard, _ = guard_with(tmp_path)
    guard.go_back(folder_of(tmp_path))
    guard.rolled_back(30)
    for step in (31, 32):
        guard.observe(step, 0.02)
    guard.close()
    for _ in range(2):
        again = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
        again.resumed(30)
        assert again._grace_left == 5
        again.close()


def test_a_journal_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch, caplog):
    """One read error: the pins stay where they are, and the next process finds everything again."""
    guard, _ = guard_with(tmp_path)
    run_id = guard.run_id
    guard.close()
    before = sorted(p.name for p in (tmp_path / "kl_guard" / "pins").iterdir())
    journal = (tmp_path / "kl_guard" / "journal.jsonl").read_bytes()

    def broken(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("kl_guard.journal.records_of", broken)
        again = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
        again.resumed(20)
        again.observe(21, 0.02)
        again.checkpoint_saved(22, checkpoint(tmp_path, 22))
        again.close()
    assert "cannot be read" in caplog.text
    assert "watches without memory" in caplog.text
    assert sorted(p.name for p in (tmp_path / "kl_guard" / "pins").iterdir()) == before
    assert (tmp_path / "kl_guard" / "journal.jsonl").read_bytes() == journal
    third = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    assert third.recover()
    assert third.run_id == run_id
    third.close()


def test_an_output_folder_that_was_moved(tmp_path, monkeypatch):
    """Or given relative, and the process started elsewhere: checkpoints, pins and quarantine are found as before."""
    (tmp_path / "a").mkdir()
    guard, decision = guard_with(tmp_path / "a")
    guard.close()
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    again = KLGuard(GuardConfig(action="rollback"), output_dir="b", announce=False)
    assert again.recover()
    shutil.rmtree(tmp_path / "b" / "kl_guard" / "pins" / f"step-{decision.checkpoint.step}")
    assert again.go_back(folder_of(Path("b"))).step == decision.checkpoint.step
    again.rolled_back(decision.checkpoint.step)
    assert sorted(p.name for p in (tmp_path / "b").glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-20",
        "checkpoint-30",
    ]
    again.close()


def test_a_checkpoint_that_rotation_has_half_deleted(tmp_path, caplog):
    """Without a pin too: the journal knows which files there were, and how large."""
    config = GuardConfig(action="rollback", pin_checkpoints=False)
    guard, _ = guard_with(tmp_path, config)
    guard.close()
    (tmp_path / "checkpoint-30" / "optimizer.pt").unlink()
    again = KLGuard(config, output_dir=tmp_path, announce=False)
    assert again.recover()
    assert again.go_back(folder_of(tmp_path)).step == 20
    assert f"{tmp_path / 'checkpoint-30' / 'optimizer.pt'} is missing" in caplog.text
    again.close()


def test_the_same_step_saved_again(tmp_path):
    """Into the same folder: the older pin is moved aside, and the new one is what the trainer saved last."""
    keeper = keep(tmp_path, 10)
    path = tmp_path / "checkpoint-10"
    (path / "optimizer.pt").write_bytes(b"PKnew")  # in place, through the link
    keeper.saved(Checkpoint(10, str(path)))
    keeper.wait()
    assert content(Path(keeper.newest_before(20).path)) == content(path)
    assert (tmp_path / "kl_guard" / "quarantine" / "attempt-0-pin-10").is_dir()
    keeper.close()


def test_a_checkpoint_that_nobody_could_tell_of_is_moved_too(tmp_path):
    """Killed between the save and the note of it, then resumed from an earlier step."""
    guard, _ = guard_with(tmp_path)
    guard.close()
    unknown = checkpoint(tmp_path, 45)
    again = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    again.resumed(20, present={10: tmp_path / "checkpoint-10", 45: unknown})
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-20"]
    again.close()


def test_a_sound_pin_is_read_once(tmp_path, monkeypatch):
    """Deciding, preparing and putting back look at it again and again; a large checkpoint takes minutes to read."""
    from kl_guard.checkpoints import manifest

    monkeypatch.setattr(pins_module, "SMALL", 1 << 10)
    guard, _ = guard_with(tmp_path)
    read = []
    checksum = manifest.checksum
    monkeypatch.setattr(manifest, "checksum", lambda path, *rest: read.append(path) or checksum(path, *rest))
    assert guard.go_back(folder_of(tmp_path)).step == 30
    assert [path for path in read if path.name == "model.safetensors"] == []
    guard.close()
