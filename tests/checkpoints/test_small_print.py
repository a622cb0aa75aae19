"""What pins, keeper and soundness say and keep in their rarer turns: each told once, nothing lost."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from checkpoint_files import LARGE, checkpoint, content
from kl_guard import Checkpoint
from kl_guard.checkpoints import FileRecord, Keeper, Ledger, Manifest, PinStore, Quarantine, wanted
from kl_guard.checkpoints import pins as pins_module
from kl_guard.checkpoints.manifest import NAME, checksum
from kl_guard.checkpoints.soundness import problems


@pytest.fixture(autouse=True)
def _listened(caplog):
    caplog.set_level(logging.INFO, "kl_guard")


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "kl_guard"]


def store_at(tmp_path, run_id="run-a", small=LARGE):
    return PinStore(tmp_path / "kl_guard" / "pins", run_id, small=small)


def store_with(tmp_path, *steps, run_id="run-a", **given):
    store = store_at(tmp_path, run_id)
    for step in steps:
        assert store.pin(step, checkpoint(tmp_path, step), calm=True, **given)
    store.wait()
    return store


def steps_of(store):
    return [pin.step for pin in store.pins()]


# Manifests and what they say.


def test_a_manifest_through_the_disk(tmp_path):
    """Every field, also those that are not the defaults."""
    for values in [(True, False, 2, True), (False, True, 0, False)]:
        calm, aligned, attempt, single = values
        manifest = Manifest("run", 7, calm, aligned, "where", {"a/b": FileRecord(3, "x")}, attempt, single)
        manifest.write(tmp_path)
        assert Manifest.read(tmp_path) == manifest


def test_manifests_of_before_attempts(tmp_path):
    """Written by an earlier version: the first attempt, a folder."""
    data = {
        "run_id": "r",
        "step": 7,
        "calm": True,
        "aligned": True,
        "source": "x",
        "files": {"a": vars(FileRecord(1, ""))},
    }
    (tmp_path / NAME).write_text(json.dumps(data))
    read = Manifest.read(tmp_path)
    assert (read.attempt, read.single) == (0, False)


def test_a_manifest_that_is_none_names_itself(tmp_path):
    """The complaint has the path."""
    (tmp_path / NAME).write_text("{}")
    with pytest.raises(ValueError, match=rf"{NAME} is no manifest \(KeyError\('files'\)\)"):
        Manifest.read(tmp_path)


def test_the_checksum_of_a_large_file_does_not_hold_it_in_memory(tmp_path):
    """In pieces of 4 MB."""
    import tracemalloc

    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 25)
    tracemalloc.start()
    checksum(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


# Pins.


def test_what_a_pin_says_of_its_checkpoint(tmp_path):
    """As it was told, the rest by default."""
    store = store_with(tmp_path, 10)
    assert store.pin(20, checkpoint(tmp_path, 20), calm=True, aligned=False, attempt=3)
    store.wait()
    manifests = [pin.manifest for pin in store.pins()]
    assert [(m.aligned, m.attempt, m.calm, m.single) for m in manifests] == [
        (True, 0, True, False),
        (False, 3, True, False),
    ]
    assert repr(store) == f"PinStore({str(store.folder)!r}, run_id='run-a')"


def test_a_step_is_pinned_once(tmp_path):
    """Neither while it is being built nor when it is there, and the pin is not touched."""
    store = store_at(tmp_path)
    source = checkpoint(tmp_path, 10)
    assert store.pin(10, source, calm=True)
    assert not store.pin(10, source, calm=True)
    store.wait()
    assert store.building == set()
    before = content(store.folder / "step-10")
    shutil.rmtree(source)
    assert not store.pin(10, checkpoint(tmp_path, 10), calm=True)
    store.wait()
    assert content(store.folder / "step-10") == before


def test_an_empty_checkpoint_is_not_pinned(tmp_path, caplog):
    """Said once, with the reason."""
    (tmp_path / "checkpoint-10").mkdir()
    store = store_at(tmp_path)
    for _ in range(2):
        assert not store.pin(10, tmp_path / "checkpoint-10", calm=True)
    where = tmp_path / "checkpoint-10"
    assert said(caplog) == [f"kl-guard: checkpoint {where} is not pinned: {where} holds no files"]


def test_nested_folders_are_pinned_and_given_back(tmp_path):
    """Folders in folders, by links and by copies."""
    source = checkpoint(tmp_path, 10)
    (source / "a" / "b" / "c").mkdir(parents=True)
    (source / "a" / "b" / "c" / "large").write_bytes(b"x" * LARGE)
    (source / "a" / "b" / "c" / "small").write_bytes(b"x" * (LARGE - 1))
    store = store_at(tmp_path)
    assert store.pin(10, source, calm=True)
    store.wait()
    (pin,) = store.pins()
    deep = Path("a") / "b" / "c"
    assert (pin.path / deep / "large").samefile(source / deep / "large"), "at the limit: a link"
    assert not (pin.path / deep / "small").samefile(source / deep / "small"), "below it: a copy"
    target = tmp_path / "x" / "y" / "checkpoint-10"
    store.provide(pin, target)
    assert content(target) == content(source)
    assert (target / deep / "large").samefile(pin.path / deep / "large")
    assert not (target / deep / "small").samefile(pin.path / deep / "small")
    assert [p.name for p in store.folder.iterdir()] == ["step-10"], "no draft is left"


@pytest.mark.parametrize("number", sorted(pins_module.NO_LINKS))
def test_given_back_by_copies_where_links_cannot_be_made(tmp_path, monkeypatch, number):
    """The same content."""
    store = store_with(tmp_path, 10)
    (pin,) = store.pins()

    def refuse(*_, **__):
        raise OSError(number, "no")

    monkeypatch.setattr(os, "link", refuse)
    store.provide(pin, tmp_path / "again")
    assert content(tmp_path / "again") == content(pin.path)
    assert not (tmp_path / "again" / "optimizer.pt").samefile(pin.path / "optimizer.pt")


def test_not_given_back_when_the_disk_fails(tmp_path, monkeypatch):
    """The error comes through, and nothing is left under the name."""
    store = store_with(tmp_path, 10)
    (pin,) = store.pins()

    def refuse(*_, **__):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="broken"):
        store.provide(pin, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert [p.name for p in store.folder.iterdir()] == ["step-10"]


def test_too_little_room_is_said_in_megabytes(tmp_path, monkeypatch, caplog):
    """Nothing is copied below two checkpoints' worth, and at exactly that it is."""
    source = checkpoint(tmp_path, 10, size=3_000_000)
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    free = 2 * size - 1

    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "other disk")

    usage = type("Usage", (), {"free": property(lambda self: free)})()
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    store = store_at(tmp_path)
    assert not store.pin(10, source, calm=True)
    (line,) = said(caplog)
    assert line.endswith("is not pinned: it would have to be copied (6 MB), and 12 MB are free")
    free = 2 * size
    assert store.pin(10, source, calm=True)
    store.wait()
    assert steps_of(store) == [10]


def test_a_fault_of_the_guards_own_in_pinning(tmp_path, monkeypatch, caplog):
    """Told with a traceback and once in words; no draft stays, and the next one is made."""
    store = store_at(tmp_path)
    monkeypatch.setattr(pins_module, "checksum", lambda *_, **__: 1 / 0)
    for step in (10, 20):
        assert store.pin(step, checkpoint(tmp_path, step), calm=True)
        store.wait()
    assert steps_of(store) == []
    assert list(store.folder.iterdir()) == []
    lines = said(caplog)
    assert lines.count("kl-guard: a fault of the guard itself in pinning; training goes on") == 2
    assert [line for line in lines if "is not pinned" in line] == [
        f"kl-guard: checkpoint {tmp_path / 'checkpoint-10'} is not pinned"
    ]
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(pins_module, "checksum", checksum)
    assert store.pin(30, checkpoint(tmp_path, 30), calm=True)
    store.wait()
    assert steps_of(store) == [30]


def test_each_kind_of_trouble_is_said_once(tmp_path, monkeypatch, caplog):
    """Disk errors of one number once, of another again."""
    store = store_at(tmp_path)
    for step, number in [(10, errno.EIO), (20, errno.EIO), (30, errno.ENOSPC)]:

        def refuse(*_, number=number, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
        assert not store.pin(step, checkpoint(tmp_path, step), calm=True)
    assert [line.partition(" is not pinned: ")[0][-2:] for line in said(caplog)] == ["10", "30"]


def test_each_pin_that_cannot_be_used_is_said_once(tmp_path, caplog):
    """By its path, and the others are found."""
    store = store_with(tmp_path, 10, 20, 30)
    for step in (10, 20):
        (store.folder / f"step-{step}" / NAME).write_text("{}")
    for _ in range(2):
        assert steps_of(store) == [30]
    assert sorted(line.split()[2][-2:] for line in said(caplog)) == ["10", "20"]
    assert all(" is not used: " in line for line in said(caplog))


def test_pins_under_another_name_or_of_another_run(tmp_path):
    """Both must fit."""
    store = store_with(tmp_path, 10, 20)
    (store.folder / "step-20").rename(store.folder / "step-21")
    assert steps_of(store) == [10]
    assert steps_of(PinStore(store.folder, "run-b")) == []


def test_damage_is_said_for_each_file(tmp_path, caplog):
    """Once, however often one looks."""
    store = store_with(tmp_path, 10)
    (pin,) = store.pins()
    (pin.path / "trainer_state.json").write_text("{}")
    (pin.path / "sub" / "shard-0").unlink()
    for _ in range(2):
        assert not store.sound(pin)
    lines = said(caplog)
    assert len(lines) == 2
    assert all(line.startswith("kl-guard: pin of step 10 is not used: ") for line in lines)


def test_what_is_left_of_other_processes_and_runs(tmp_path):
    """Drafts go, also one that is half deleted by somebody else; complete pins are put aside under their run's name."""
    store_with(tmp_path, 10, 20, run_id="run-b")
    store = store_at(tmp_path)
    (store.folder / ".draft-30-earlier").mkdir()
    (store.folder / ".draft-40-earlier").write_text("no folder")  # rmtree refuses it
    (store.folder / "step-50").mkdir()
    store.clean()
    store.clean()
    assert sorted(p.name for p in store.folder.iterdir()) == [".draft-40-earlier", "of-run-b", "of-unknown"]
    assert sorted(p.name for p in (store.folder / "of-run-b").iterdir()) == ["step-10", "step-20"]


def test_a_pin_that_cannot_be_put_aside(tmp_path, monkeypatch, caplog):
    """Said once for all of them, and they stay."""
    store_with(tmp_path, 10, 20, run_id="run-b")
    store = store_at(tmp_path)

    def refuse(*_):
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "rename", refuse)
    store.clean()
    (line,) = said(caplog)
    assert line.endswith("a pin of another run, cannot be put aside: [Errno 13] no")
    assert len(list(store.folder.glob("step-*"))) == 2


def test_surplus_that_cannot_be_removed(tmp_path, monkeypatch, caplog):
    """Said once, and the others go."""
    store = store_with(tmp_path, 10, 20, 30, 40)
    rename = Path.rename

    def refuse(self, target):
        if self.name in {"step-10", "step-20"}:
            raise OSError(errno.EACCES, "no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    store.thin_out(lambda steps: {40})
    assert steps_of(store) == [10, 20, 40]
    (line,) = said(caplog)
    assert "surplus pin " in line
    assert line.endswith("cannot be removed: [Errno 13] no")


def test_manifests_of_pins_that_are_gone(tmp_path):
    """Kept as long as the original is there, to tell whether it is sound; of this run only, and by its name."""
    store = store_with(tmp_path, 10, 20, 30)
    store.thin_out(lambda steps: {30})
    kept = store.folder / "manifests"
    assert sorted(p.name for p in kept.iterdir()) == ["step-10", "step-20"]
    assert store.manifest_of(10, tmp_path / "checkpoint-10").step == 10
    assert store.manifest_of(10, tmp_path / "another") is None
    assert store.manifest_of(11, tmp_path / "checkpoint-10") is None
    assert PinStore(store.folder, "run-b").manifest_of(10, tmp_path / "checkpoint-10") is None
    shutil.rmtree(tmp_path / "checkpoint-10")
    (kept / "step-5").mkdir()  # without a manifest
    assert store.pin(40, checkpoint(tmp_path, 40), calm=True)
    store.wait()
    store.thin_out(lambda steps: {30})
    assert sorted(p.name for p in kept.iterdir()) == ["step-20", "step-40"]
    assert store.forget_after(20) == [(30, store.folder / "step-30")]
    assert sorted(p.name for p in kept.iterdir()) == ["step-20"]
    assert store.forget(20) is None
    assert list(kept.iterdir()) == []


def test_a_step_that_is_thinned_out_twice(tmp_path):
    """Pinned again after its pin had gone: its manifest is replaced."""
    store = store_with(tmp_path, 10, 20)
    for _ in range(2):
        store.thin_out(lambda steps: {20})
        assert steps_of(store) == [20]
        assert store.manifest_of(10, tmp_path / "checkpoint-10") is not None
        assert store.pin(10, tmp_path / "checkpoint-10", calm=True)
        store.wait()


def test_originals_are_found_where_the_run_was_moved_to(tmp_path):
    """Manifests of pins that are gone stay with the originals of the moved run."""
    before = tmp_path / "before"
    before.mkdir()
    store_with(before, 10, 20).close()
    before.rename(tmp_path / "after")
    store = store_at(tmp_path / "after")
    store.thin_out(lambda steps: {20})
    assert store.manifest_of(10, tmp_path / "after" / "checkpoint-10") is not None


def test_the_pin_of_a_step_that_is_saved_again(tmp_path):
    """Given to the caller only where there is one, and complete."""
    store = store_at(tmp_path)
    assert store.forget(10) is None
    assert store.pin(10, checkpoint(tmp_path, 10), calm=True)
    path = store.forget(10)
    assert path == store.folder / "step-10"
    assert (path / NAME).is_file(), "being built, it was waited for"


def test_the_same_content_or_not(tmp_path, monkeypatch):
    """A folder that cannot be looked at is not the same."""
    store = store_with(tmp_path, 10)
    (pin,) = store.pins()
    assert store.same(pin, tmp_path / "checkpoint-10")

    def refuse(*_):
        raise OSError(errno.ESTALE, "gone")

    monkeypatch.setattr(Path, "samefile", refuse)
    assert not store.same(pin, tmp_path / "checkpoint-10")


def test_only_what_this_process_wrote_is_known_as_its_own(tmp_path):
    """Not after a restart, not with another manifest, not for a step that was saved again."""
    store = store_with(tmp_path, 10, 20)
    first, second = store.pins()
    assert store.made_here(first)
    assert not store_at(tmp_path).made_here(first)
    other = dataclasses.replace(second.manifest, attempt=5)
    other.write(second.path)
    assert not store.made_here(store.pins()[1])
    store.forget(10)
    assert not store.made_here(first)


# The keeper.


def keeper_at(tmp_path, **given):
    keeper = Keeper(tmp_path / "kl_guard", **given)
    keeper.begin("run-a")
    return keeper


def test_the_ledger_gives_what_it_was_given():
    """By step, in order."""
    ledger = Ledger()
    for step in (20, 10):
        ledger.add(Checkpoint(step, str(step)))
    assert ledger.get(10) == Checkpoint(10, "10")
    assert ledger.get(15) is None
    assert repr(ledger) == "Ledger(steps=[10, 20])"
    keeper = Keeper(None)
    keeper.begin("run-a", list(ledger))
    assert keeper.get(20) == Checkpoint(20, "20")
    assert repr(keeper) == "Keeper(Ledger(steps=[10, 20]))"


def test_pins_carry_what_the_checkpoint_is(tmp_path):
    """And a checkpoint that only its pin knows is told from the manifest, in full."""
    keeper = keeper_at(tmp_path)
    keeper.saved(Checkpoint(10, str(checkpoint(tmp_path, 10)), aligned=False, attempt=2))
    keeper.close()
    again = keeper_at(tmp_path)
    found = again.newest_before(11)
    assert found == Checkpoint(10, str(tmp_path / "kl_guard" / "pins" / "step-10"), True, False, 2)
    known = Checkpoint(10, str(tmp_path / "checkpoint-10"), aligned=False, attempt=2, facts={"weights": "x"})
    again.begin("run-a", [known])
    assert again.newest_before(11).facts == {"weights": "x"}
    assert again.newest_before(10) is None
    again.close()


def test_a_run_without_files(tmp_path):
    """Keeps its ledger, moves nothing, and knows the name that was written over as gone."""
    keeper = Keeper(None)
    keeper.begin("run-a")
    path = checkpoint(tmp_path, 10)
    for step in (10, 20):
        keeper.saved(Checkpoint(step, str(path)))
    assert [one.path for one in keeper] == ["", str(path)]
    assert keeper.move_aside([path], 0) == 0
    assert path.exists()
    keeper.provide(Checkpoint(20, str(path)), tmp_path / "x", 0)
    keeper.go_back(0)
    assert path.exists()
    assert list(keeper) == []


def test_a_process_that_does_not_write(tmp_path):
    """Another rank: nothing is pinned or moved, contents are not its to read, the path is."""
    keeper = Keeper(tmp_path / "kl_guard")
    keeper.begin("run-a", writes=False)
    path = checkpoint(tmp_path, 10)
    (path / "model.safetensors").write_bytes(b"damaged")
    keeper.saved(Checkpoint(10, str(path)))
    assert not (tmp_path / "kl_guard").exists()
    assert keeper.newest_before(11).path == str(path)
    assert keeper.move_aside([path], 0) == 0
    alone = Keeper(None)
    alone.begin("run-a", [Checkpoint(10, str(path))], writes=False)
    assert alone.newest_before(11) is None


def test_a_name_that_is_written_over_leaves_its_pin(tmp_path):
    """`last` of step 20 is in the place of that of step 10, whose pin is what is left of it."""
    keeper = keeper_at(tmp_path)
    path = checkpoint(tmp_path, 10)
    keeper.saved(Checkpoint(10, str(path)))
    keeper.wait()
    keeper.saved(Checkpoint(20, str(path)))
    assert keeper.get(10).path == str(tmp_path / "kl_guard" / "pins" / "step-10")
    keeper.close()


def test_without_pins_originals_are_compared_by_themselves(tmp_path, caplog):
    """Each complaint once, and the next older one is found."""
    keeper = keeper_at(tmp_path, pins=False)
    for step in (10, 20):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step))))
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text("{")
    for _ in range(2):
        assert keeper.newest_before(30).step == 10
    assert said(caplog) == [
        "kl-guard: the checkpoint of step 20 is not used: "
        f"{tmp_path / 'checkpoint-20' / 'trainer_state.json'} is no JSON"
    ]
    keeper.go_back(10)
    assert (
        said(caplog)[-1] == f"kl-guard: 1 checkpoint or pin of steps after 10 moved to {tmp_path}/kl_guard/quarantine"
    )
    before = len(said(caplog))
    keeper.go_back(10)
    assert len(said(caplog)) == before, "nothing was moved, so nothing is said"


def test_how_far_one_goes_for_an_exact_one(tmp_path):
    """One and a half times as far, that included; seen from the step asked about where now is not told."""
    for exact, found in [(70, 70), (69, 80)]:
        folder = tmp_path / str(exact)
        folder.mkdir()
        keeper = keeper_at(folder)
        keeper.saved(Checkpoint(exact, str(checkpoint(folder, exact))))
        keeper.saved(Checkpoint(80, str(checkpoint(folder, 80)), aligned=False))
        keeper.wait()
        assert keeper.newest_before(100).step == found
        assert keeper.newest_before(81, now=100).step == found
        assert keeper.newest_before(81).step == 80
        keeper.close()


def test_checkpoints_that_are_not_good_are_passed_over(tmp_path):
    """Those of pins are judged as pins, and older ones are asked."""
    keeper = keeper_at(tmp_path)
    for step in (10, 20, 30):
        keeper.saved(Checkpoint(step, str(checkpoint(tmp_path, step))))
    keeper.wait()
    pins = str(tmp_path / "kl_guard" / "pins")
    asked = []

    def good(one):
        asked.append(one.path.startswith(pins))
        return one.step < 20

    assert keeper.newest_before(31, good=good).step == 10
    assert asked == [True, True, True]
    keeper.close()


def test_a_pin_is_put_in_the_place_of_what_rotation_took(tmp_path, caplog):
    """And keeps what was noted of it; where that cannot be done it is said."""
    keeper = keeper_at(tmp_path)
    path = checkpoint(tmp_path, 10)
    noted = Checkpoint(10, str(path), facts={"weights": "x"})
    keeper.saved(noted)
    keeper.wait()
    before = content(path)
    shutil.rmtree(path)
    back = keeper.newest_before(11)
    keeper.provide(back, path, 0)
    assert content(path) == before
    assert (keeper.get(10).path, keeper.get(10).facts) == (str(path), {"weights": "x"})
    (tmp_path / "file").write_text("")
    keeper.provide(back, tmp_path / "file" / "checkpoint-10", 0)
    assert said(caplog)[-1].startswith(
        f"kl-guard: the pin of step 10 cannot be put back as {tmp_path / 'file' / 'checkpoint-10'}: "
    )
    again = keeper_at(tmp_path)
    shutil.rmtree(path)
    again.provide(Checkpoint(10, "elsewhere"), path, 0)
    assert again.get(10).path == str(path), "one that was not in the ledger"
    for one in (keeper, again):
        one.close()


@pytest.mark.parametrize("path", ["", "x" * 5000, "a\0b", "nowhere"])
def test_a_checkpoint_whose_name_is_none(tmp_path, caplog, path):
    """Not there, without a word."""
    keeper = keeper_at(tmp_path, pins=False)
    keeper.saved(Checkpoint(10, path))
    assert keeper.newest_before(20) is None
    assert said(caplog) == []


def test_a_new_run_has_a_new_store(tmp_path):
    """And the same run keeps its own."""
    keeper = keeper_at(tmp_path)
    keeper.saved(Checkpoint(10, str(checkpoint(tmp_path, 10))))
    keeper.wait()
    keeper.begin("run-a")
    assert keeper.newest_before(11).step == 10
    keeper.begin("run-b")
    assert keeper.newest_before(11) is None
    keeper.close()


def test_what_quarantine_says(tmp_path, caplog):
    """What it leaves, and what it could not move, with paths."""
    inside = tmp_path / "run"
    inside.mkdir()
    quarantine = Quarantine(inside / "deep" / "er", within=inside)
    assert repr(quarantine) == f"Quarantine({str(inside / 'deep' / 'er')!r})"
    outside = checkpoint(tmp_path, 10)
    assert quarantine.take(outside, 0) is None
    assert quarantine.take(checkpoint(inside, 10), 3) == inside / "deep" / "er" / "attempt-3-checkpoint-10"
    assert quarantine.take(inside / "deep", 0) is None
    lines = said(caplog)
    assert lines[0] == f"kl-guard: {outside} lies outside of {inside} and is left where it is"
    assert lines[1].startswith(f"kl-guard: {inside / 'deep'} cannot be moved aside: [Errno ")


# Soundness without a manifest.


def header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


WEIGHT = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("name", "data", "complaint"),
    [
        ("a.json", b"{}", ""),
        ("a.json", b"{", "is no JSON"),
        ("a.json", b"", "is empty"),
        ("a.txt", b"anything", ""),
        ("a.safetensors", header(w=WEIGHT) + b"1234", ""),
        ("a.safetensors", header(), ""),
        ("a.safetensors", header(__metadata__={"format": "pt"}, w=WEIGHT) + b"1234", ""),
        ("a.safetensors", header(w=WEIGHT) + b"123", "has 71 bytes instead of 72"),
        ("a.safetensors", header(w=WEIGHT)[:20], "is cut short: 20 bytes, and its header alone takes 60"),
        ("a.safetensors", header(w=WEIGHT)[:-1], "is cut short: 67 bytes, and its header alone takes 60"),
        ("a.safetensors", (4).to_bytes(8, "little") + b"none", "has no readable header"),
        ("a.pt", b"\x80\x02no archive", ""),
    ],
)
def test_files_that_say_what_is_in_them(tmp_path, name, data, complaint):
    """The complaint in full."""
    (tmp_path / name).write_bytes(data)
    assert list(problems(tmp_path)) == ([f"{tmp_path / name} {complaint}"] if complaint else [])


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt"])
def test_archives_are_read_by_their_checksums(tmp_path, suffix):
    """Whatever torch's files are called."""
    path = tmp_path / f"a.{suffix}"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", b"0123456789")
    assert list(problems(tmp_path)) == []
    path.write_bytes(path.read_bytes().replace(b"0123456789", b"0123456780"))
    assert list(problems(tmp_path)) == [f"{path} is damaged (in data)"]


def test_sizes_that_were_noted(tmp_path):
    """Missing and cut short are told apart, with the path."""
    (tmp_path / "a").write_text("12")
    assert list(problems(tmp_path, None, {"a": 3, "b": 1})) == [
        f"{tmp_path / 'a'} has 2 bytes instead of 3",
        f"{tmp_path / 'b'} is missing",
    ]


# Which pins are worth their space.


@pytest.mark.parametrize(
    ("calm", "now", "kept"),
    [
        ([10, 20, 30, 60, 75, 80, 90, 100], 100, [10, 60, 90, 100]),
        ([10, 50, 80, 85, 90, 100], 100, [10, 50, 90, 100]),
        ([10, 49, 74, 90, 100], 100, [10, 74, 90, 100]),
        ([10, 75, 90, 100], 100, [10, 75, 90, 100]),
        ([10, 76, 80, 90, 100], 100, [10, 76, 90, 100]),
        ([10, 20, 30, 90, 100], 100, [10, 90, 100]),
        ([76, 77, 78, 79], 100, [76, 78, 79]),
        ([10, 51, 76, 77, 90, 100], 100, [10, 51, 76, 90, 100]),
        ([10, 50, 75, 76, 90, 100], 100, [10, 50, 75, 90, 100]),
        ([], 100, []),
    ],
)
def test_which_pins_are_kept(calm, now, kept):
    """Oldest, two newest, one aged a quarter to a half of the run, its heir; without it the oldest younger."""
    assert sorted(wanted(calm, now)) == sorted(kept)
