"""Pins: complete or absent, never torn, never in the trainer's way, never deleting what is not theirs."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_files import LARGE, checkpoint, content
from kl_guard import Checkpoint, KLGuard
from kl_guard.checkpoints import Keeper, Manifest, PinStore, wanted
from kl_guard.checkpoints import pins as pins_module
from streams import blow_up


@pytest.fixture
def store(tmp_path):
    made = PinStore(tmp_path / "pins", "run-a", small=LARGE)
    yield made
    made.close()


def test_a_pin_is_a_complete_copy_that_rotation_cannot_reach(store, tmp_path):
    """Large files are the same inode, small ones are copies; the original may go."""
    source = checkpoint(tmp_path, 10)
    before = content(source)
    assert store.pin(10, source, calm=True)
    store.wait()
    pin = store.folder / "step-10"
    assert (source / "model.safetensors").samefile(pin / "model.safetensors")
    assert not (source / "trainer_state.json").samefile(pin / "trainer_state.json")
    shutil.rmtree(source)
    assert content(pin) == before
    (found,) = store.pins()
    assert (found.step, found.manifest.calm, found.manifest.source) == (10, True, str(source))
    assert store.sound(found)


def test_rewriting_a_small_file_in_place_does_not_reach_the_pin(store, tmp_path):
    """Trainers rewrite trainer_state.json when they save the same step again."""
    source = checkpoint(tmp_path, 10)
    store.pin(10, source, calm=True)
    store.wait()
    (source / "trainer_state.json").write_text("changed")
    assert store.sound(store.pins()[0])


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.ENOTSUP])
def test_where_links_cannot_be_made_files_are_copied(store, tmp_path, monkeypatch, code):
    """In the background, and complete even when rotation deletes the original before the copy is done."""

    def no_links(*_):
        raise OSError(code, "no links here")

    monkeypatch.setattr(pins_module.os, "link", no_links)
    source = checkpoint(tmp_path, 10)
    before = content(source)
    store._worker = slow = pins_module.ThreadPoolExecutor(1)
    slow.submit(time.sleep, 0.2)
    assert store.pin(10, source, calm=True)
    shutil.rmtree(source)
    store.wait()
    assert content(store.folder / "step-10") == before
    assert store.sound(store.pins()[0])


def test_without_room_for_a_copy_nothing_is_copied(store, tmp_path, monkeypatch, caplog):
    """A guard that fills the disk would kill the trainer's own save; said once."""

    def no_links(*_):
        raise OSError(errno.EXDEV, "no links here")

    monkeypatch.setattr(pins_module.os, "link", no_links)
    usage = type("Usage", (), {"free": 3 * LARGE})()
    monkeypatch.setattr(pins_module.shutil, "disk_usage", lambda _: usage)
    for step in (10, 20):
        assert not store.pin(step, checkpoint(tmp_path, step), calm=True)
    assert list(store.folder.iterdir()) == []
    assert caplog.text.count("is not pinned") == 1


def test_a_disk_that_fills_up_while_pinning(store, tmp_path, monkeypatch, caplog):
    """The draft is removed, it is said, and nothing is offered."""
    monkeypatch.setattr(Manifest, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    store.pin(10, checkpoint(tmp_path, 10), calm=True)
    store.wait()
    assert store.pins() == []
    assert list(store.folder.iterdir()) == []
    assert "full" in caplog.text


def test_a_checkpoint_that_is_not_there(store, tmp_path, caplog):
    """One message, no pin, no exception."""
    (tmp_path / "empty").mkdir()
    assert not store.pin(10, tmp_path / "nowhere", calm=True)
    assert not store.pin(11, tmp_path / "empty", calm=True)
    assert "is not pinned" in caplog.text


DAMAGES = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "empty": lambda p: p.write_bytes(b""),
    "missing": lambda p: p.unlink(),
    "flipped": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", "sub/shard-0"])
def test_a_damaged_pin_is_never_offered(tmp_path, caplog, damage, name):
    """The older sound one is, and the message names the file."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    for step in (10, 20):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step))))
    keeper.close()
    for step in (10, 20):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    damage(tmp_path / "kl_guard" / "pins" / "step-20" / name)
    assert keeper.newest_before(30).step == 10
    assert str(tmp_path / "kl_guard" / "pins" / "step-20" / name) in caplog.text


OUTSIDE = {"run_id": "run-a", "step": 10, "calm": True, "aligned": True, "source": ""}
OUTSIDE["files"] = {"../../x": {"size": 1, "sha256": ""}}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run_id": "run-a"}', json.dumps(OUTSIDE)])
def test_a_pin_without_a_sound_manifest_is_not_used(store, tmp_path, caplog, text):
    """Half-written, foreign, or pointing outside of its folder."""
    store.pin(10, checkpoint(tmp_path, 10), calm=True)
    store.wait()
    (store.folder / "step-10" / "kl_guard_manifest.json").write_text(text)
    assert store.pins() == []
    assert "is not used" in caplog.text


def test_pins_of_another_run_are_put_aside_not_deleted(store, tmp_path):
    """A fresh start in a used folder: nothing of the old run counts, nothing of it is lost."""
    store.pin(10, checkpoint(tmp_path, 10), calm=True)
    store.close()
    (store.folder / ".draft-99-1").mkdir()
    new = PinStore(store.folder, "run-b", small=LARGE)
    new.clean()
    assert new.pins() == []
    assert sorted(p.name for p in store.folder.iterdir()) == ["of-run-a"]
    assert Manifest.read(store.folder / "of-run-a" / "step-10").step == 10
    assert new.pin(10, tmp_path / "checkpoint-10", calm=True)
    new.close()


def test_only_surplus_pins_are_deleted(store, tmp_path):
    """Not the checkpoints, not what lies beside them."""
    for step in (10, 20, 30):
        store.pin(step, checkpoint(tmp_path, step), calm=True)
    store.wait()
    (store.folder / "notes.txt").write_text("mine")
    store.thin_out(lambda steps: {20})
    assert sorted(p.name for p in store.folder.iterdir()) == ["manifests", "notes.txt", "step-20"]
    assert all((tmp_path / f"checkpoint-{step}" / "model.safetensors").exists() for step in (10, 20, 30))


def test_the_caller_waits_for_links_only(tmp_path):
    """Pinning returns while checksums are still being taken."""
    store = PinStore(tmp_path / "kl_guard" / "pins", "run-a", small=LARGE)
    source = checkpoint(tmp_path, 10, size=1 << 26)
    began = time.perf_counter()
    store.pin(10, source, calm=True)
    returned = time.perf_counter() - began
    store.wait()
    whole = time.perf_counter() - began
    assert returned < whole / 4
    store.close()


@given(st.integers(1, 60), st.integers(9, 200))
def test_there_is_always_a_pin_of_every_age(every, saves):
    """The oldest, the two newest, and one aged a quarter to a half of the run from the eighth save on; at most five."""
    kept: set[int] = set()
    for now in range(every, every * saves, every):
        kept = wanted({*kept, now}, now)
        assert len(kept) <= 5
        assert every in kept
        assert set(sorted(range(every, now + 1, every))[-2:]) <= kept
        if now >= 8 * every:
            assert any(now / 4 <= now - step <= now / 2 for step in kept)


def test_under_a_suspicion_every_pin_is_kept(tmp_path):
    """How far back the trouble began is not known yet; afterwards thinning goes on."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    for step in range(10, 110, 10):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step, 100))))
        keeper._pins.wait()
    before = {pin.step for pin in keeper._pins.pins()}
    for step in range(110, 400, 10):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step, 100)), calm=False), suspicion=True)
    keeper._pins.wait()
    assert {pin.step for pin in keeper._pins.pins()} == before
    keeper.saved(Checkpoint(400, str(checkpoint(tmp_path, 400, 100))))
    keeper._pins.wait()
    keeper.saved(Checkpoint(410, str(checkpoint(tmp_path, 410, 100))))
    assert len(keeper._pins.pins()) <= 5
    keeper.close()


@pytest.mark.parametrize(("every", "growth"), [(10, 1.06), (5, 1.03), (10, 1.03), (1, 1.3)])
@pytest.mark.parametrize("start", [30, 75, 300])
def test_a_slow_blow_up_leaves_a_way_back(tmp_path, every, growth, start):
    """Rotation keeps two; suspicion comes long after the departure; there still is a checkpoint from before it."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    saved = []
    for step, kl in enumerate(blow_up(start, start + 400, growth=growth), start=1):
        decision = guard.observe(step, kl)
        if decision:
            break
        if step % every == 0:
            saved.append(checkpoint(tmp_path, step, 100))
            guard.checkpoint_saved(step, saved[-1])
            guard.checkpoints._pins.wait()
            for old in saved[:-2]:
                shutil.rmtree(old, ignore_errors=True)
    assert decision.checkpoint is not None
    assert decision.checkpoint.step < max(decision.reason.departure_step - 1, 2)
    assert Path(decision.checkpoint.path).is_dir()
    guard.close()


def test_going_back_drops_what_came_later(tmp_path):
    """Pins of the abandoned branch must not be offered, and their steps can be pinned again."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    for step in (10, 20):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step))))
    keeper.go_back(10)
    assert [c.step for c in keeper] == [10]
    assert keeper.newest_before(100).step == 10
    keeper.saved(Checkpoint(20, str(checkpoint(tmp_path / "again", 20))))
    shutil.rmtree(tmp_path / "again")
    assert keeper.newest_before(100).step == 20
    keeper.close()


def test_what_is_not_calm_is_noted_but_not_pinned(tmp_path):
    """A checkpoint from under a suspicion is no way back worth keeping."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    keeper.saved(Checkpoint(10, str(checkpoint(tmp_path, 10)), calm=False))
    keeper.close()
    assert not (tmp_path / "kl_guard" / "pins").exists()
    assert keeper.newest_before(20).step == 10


def test_an_original_that_is_not_whole_is_passed_over(tmp_path):
    """Taken by rotation, emptied, or with an empty file in it."""
    keeper = Keeper(None)
    for step in (10, 20, 30, 40):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step))))
    shutil.rmtree(tmp_path / "checkpoint-40")
    shutil.rmtree(tmp_path / "checkpoint-30")
    (tmp_path / "checkpoint-30").mkdir()
    (tmp_path / "checkpoint-20" / "optimizer.pt").write_bytes(b"")
    assert keeper.newest_before(50).step == 10
    assert keeper.newest_before(10) is None


def test_a_pin_that_one_look_at_the_folder_misses_is_kept(tmp_path, monkeypatch):
    """While another pin gets its name, a listing may leave one out; a soak run lost its oldest pin to that."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    for step in (10, 20, 30):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step))))
        keeper.wait()
    listed, looks = PinStore.pins, []

    def misses_the_oldest_at_first(self):
        looks.append(None)
        return listed(self)[1 if len(looks) == 1 else 0 :]

    monkeypatch.setattr(PinStore, "pins", misses_the_oldest_at_first)
    keeper.saved(Checkpoint(40, str(checkpoint(tmp_path, 40))))
    keeper.wait()
    assert [pin.step for pin in listed(keeper._pins)] == [10, 20, 30, 40]
    keeper.close()


def test_an_original_stands_in_for_its_damaged_pin(tmp_path, caplog):
    """Where the original still matches the manifest."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a")
    source = checkpoint(tmp_path, 10)
    keeper.saved(Checkpoint(10, str(source)))
    assert keeper.newest_before(20).path == str(tmp_path / "kl_guard" / "pins" / "step-10")
    (tmp_path / "kl_guard" / "pins" / "step-10" / "trainer_state.json").write_text("{}")
    assert keeper.newest_before(20).path == str(source)
    (source / "trainer_state.json").write_text("{}")
    assert keeper.newest_before(20) is None
    keeper.close()


KILLED = """
import sys
from pathlib import Path
from kl_guard import Checkpoint
from kl_guard.checkpoints import Keeper
sys.path[:0] = [str(Path(sys.argv[2]).parent)]
from checkpoint_files import checkpoint
import shutil
root = Path(sys.argv[1])
keeper = Keeper(root / "kl_guard")
keeper.begin("run-a")
known = []
for step in range(10, 100000, 10):
    path = checkpoint(root, step)
    keeper.saved(Checkpoint(step, str(path)))
    if step == 20:
        keeper._pins.wait()  # both pins are complete: from here on there must always be two
    print(step, flush=True)
    known.append(path)
    if len(known) > 1:  # save_total_limit=1
        shutil.rmtree(known.pop(0))
"""


def kill_at_random(tmp_path, repeats):
    """SIGKILL a process that saves, pins and rotates, at many moments; look at what a new one finds."""
    for repeat in range(repeats):
        root = tmp_path / str(repeat)
        root.mkdir()
        here = str(Path(__file__).parent)
        run = subprocess.Popen([sys.executable, "-c", KILLED, str(root), here], stdout=subprocess.PIPE, text=True)
        for _ in range(3 + repeat % 5):  # let some checkpoints be saved
            run.stdout.readline()
        time.sleep((repeat * 7919 % 1000) / 1000 * 0.02)
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
        store = PinStore(root / "kl_guard" / "pins", "run-a")
        store.clean()
        pins = store.pins()
        assert len(pins) >= 2, repeat
        assert all(store.sound(pin) for pin in pins), repeat
        assert not list((root / "kl_guard" / "pins").glob(".draft-*"))
        shutil.rmtree(root)


def test_killed_at_any_moment(tmp_path):
    """There is a complete pin, and none that is torn is offered (200 kills under `make soak`)."""
    kill_at_random(tmp_path, 6)


@pytest.mark.soak
def test_killed_at_two_hundred_moments(tmp_path):
    """Two hundred of two hundred."""
    kill_at_random(tmp_path, 200)
