"""What a run's folder says, in manifests, journals and links, leads nowhere outside of it."""

from __future__ import annotations

import json
import shutil
import zipfile

import pytest

from checkpoint_files import checkpoint, content
from kl_guard import Checkpoint, Finding, GuardConfig, KLGuard
from kl_guard.checkpoints import Keeper, Manifest, PinStore
from kl_guard.checkpoints.manifest import NAME
from kl_guard.checkpoints.soundness import problems
from kl_guard.incidents import folder_of


def store_with(tmp_path, *steps):
    """A store with complete pins, and their checkpoints beside it."""
    store = PinStore(tmp_path / "run" / "kl_guard" / "pins", "run-a", small=1 << 16)
    for step in steps:
        assert store.pin(step, checkpoint(tmp_path / "run", step), calm=True)
    store.wait()
    return store


def rewrite(pin, **changes):
    """Change what a manifest says."""
    data = json.loads((pin / NAME).read_text())
    (pin / NAME).write_text(json.dumps({**data, **changes}))


RECORD = {"size": 1, "sha256": "0"}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "..", ".", "", "a\0b"])
def test_a_manifest_that_names_what_is_elsewhere(tmp_path, name, caplog):
    """It is no manifest, its pin is no pin, and the others are there."""
    store = store_with(tmp_path, 10, 20)
    rewrite(store.folder / "step-10", files={name: RECORD})
    with pytest.raises(ValueError, match="names a file outside of its folder"):
        Manifest.read(store.folder / "step-10")
    assert [pin.step for pin in store.pins()] == [20]
    assert "names a file outside of its folder" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        "[]",
        "{}",
        "nothing",
        '{"run_id": "run-a", "step": 10, "calm": true, "aligned": true, "source": "x", "files": {}}',
        '{"run_id": "run-a", "step": 1e999, "calm": true, "aligned": true, "source": "x", "files": {"a": {}}}',
        '{"run_id": "run-a", "step": 10, "calm": true, "aligned": true, "source": "", "files": {"a": {"size": 1e999}}}',
        '{"run_id": "run-a", "step": ' + "9" * 5000 + "}",
    ],
    ids=["deep", "list", "empty", "no JSON", "no files", "infinite step", "infinite size", "huge"],
)
def test_a_manifest_that_is_none(tmp_path, text):
    """A `ValueError`, which every reader expects; nothing that matches anything."""
    store = store_with(tmp_path, 10, 20)
    (store.folder / "step-10" / NAME).write_text(text)
    with pytest.raises(ValueError, match=r"is no manifest|names no file"):
        Manifest.read(store.folder / "step-10")
    assert [pin.step for pin in store.pins()] == [20]
    store.clean()
    assert [pin.step for pin in store.pins()] == [20]


def test_a_pin_with_a_link_in_it(tmp_path, caplog):
    """What it leads to is not copied into a checkpoint, even where size and checksum fit."""
    store = store_with(tmp_path, 10)
    (pin,) = store.pins()
    secret = tmp_path / "secret"
    shutil.move(pin.path / "sub" / "shard-0", secret)
    (pin.path / "sub" / "shard-0").symlink_to(secret)
    assert not store.sound(pin)
    assert "sub/shard-0 is a link" in caplog.text


def test_a_folder_of_a_pin_that_is_a_link(tmp_path):
    """The same by way of the folder between."""
    store = store_with(tmp_path, 10)
    (pin,) = store.pins()
    shutil.move(pin.path / "sub", tmp_path / "elsewhere")
    (pin.path / "sub").symlink_to(tmp_path / "elsewhere")
    assert not store.sound(pin)


def test_pins_below_a_link_of_the_users(tmp_path):
    """The whole folder on another disk is the user's choice, and works."""
    (tmp_path / "big").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "kl_guard").symlink_to(tmp_path / "big")
    store = store_with(tmp_path, 10, 20)
    assert [store.sound(pin) for pin in store.pins()] == [True, True]
    store.thin_out(lambda steps: {20})
    assert [pin.step for pin in store.pins()] == [20]


def test_a_pin_that_is_a_link_is_left_alone(tmp_path, caplog):
    """Neither used nor removed, and what it leads to keeps its manifest."""
    store = store_with(tmp_path, 10, 20)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(store.folder / "step-10", elsewhere)
    (store.folder / "step-10").symlink_to(elsewhere)
    before = content(elsewhere)
    store.thin_out(lambda steps: set())
    assert content(elsewhere) == before
    assert (elsewhere / NAME).is_file()
    assert "it is a link, and pins are folders" in caplog.text


def test_manifests_that_are_kept_elsewhere_by_a_link(tmp_path):
    """`pins/manifests` made a link to somebody's folders: nothing in them is removed."""
    store = store_with(tmp_path, 10, 20)
    theirs = tmp_path / "theirs"
    for step in (10, 20, 30):
        (theirs / f"step-{step}").mkdir(parents=True)
        (theirs / f"step-{step}" / "thesis.tex").write_text("ten years of work")
        (theirs / f"step-{step}" / NAME).write_text("{}")
    (store.folder / "manifests").symlink_to(theirs)
    store.forget_after(0)
    store.forget(10)
    store.thin_out(lambda steps: {20})
    assert all((theirs / f"step-{step}" / "thesis.tex").is_file() for step in (10, 20, 30))
    assert (theirs / "step-30" / NAME).is_file()


def test_only_manifests_are_removed_among_manifests(tmp_path):
    """A folder there with anything else in it stays."""
    store = store_with(tmp_path, 10)
    mine = store.folder / "manifests" / "step-10"
    mine.mkdir(parents=True)
    (mine / NAME).write_text("{}")
    (mine / "note").write_text("keep")
    store.forget(10)
    assert [p.name for p in mine.iterdir()] == ["note"]


def test_odd_numbers_in_names_of_folders(tmp_path):
    """A superscript two is a digit to Python, and no number."""
    store = store_with(tmp_path, 10)
    for name in ("step-\u00b2", "step-", "step--1", "step-1e3"):
        (store.folder / name).mkdir()
    assert [step for step, _ in store.forget_after(0)] == [10]


@pytest.mark.parametrize("path", ["{out}/../other/checkpoint-40", "{tmp}/other/checkpoint-40", "link/checkpoint-40"])
def test_a_journal_that_names_what_is_elsewhere(tmp_path, path):
    """Going back moves nothing that lies outside of the output folder."""
    out, other = tmp_path / "run", tmp_path / "other"
    checkpoint(out, 20)
    checkpoint(other, 40)
    (out / "link").symlink_to(other)
    before = content(other)
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=out, announce=False)
    guard.observe(1, 0.01)
    guard.close()
    path = path.format(out=out, tmp=tmp_path) if "{" in path else str(out / path)
    with (out / "kl_guard" / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"type": "checkpoint", "step": 40, "path": path, "calm": True, "attempt": 0}) + "\n")
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=out, announce=False)
    guard.resumed(20)
    keeper = Keeper(out / "kl_guard")
    keeper.begin("run-b", [Checkpoint(20, str(out / "checkpoint-20")), Checkpoint(40, path)])
    keeper.go_back(20)
    keeper.close()
    guard.close()
    assert content(other) == before
    assert (out / "link").is_symlink()


def test_a_copied_run_leaves_the_original_alone(tmp_path):
    """The journal of the copy names the checkpoints of the original by their full paths."""
    out, copy = tmp_path / "run", tmp_path / "copy"
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=out, announce=False)
    for step in range(1, 41):
        guard.observe(step, 0.02)
        if step % 10 == 0:
            guard.checkpoint_saved(step, checkpoint(out, step))
    guard.close()
    shutil.copytree(out, copy)
    before = {path.relative_to(out): path.stat().st_ino for path in out.rglob("*")}
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=copy, announce=False)
    guard.resumed(20)
    for step in range(21, 120):
        if guard.observe(step, 0.02 * 1.5 ** max(0, step - 60)):
            break
        if step % 10 == 0:
            guard.checkpoint_saved(step, checkpoint(copy, step) if step > 40 else copy / f"checkpoint-{step}")
    assert guard.decision.action == "rollback"
    guard.go_back()
    guard.close()
    assert {path.relative_to(out): path.stat().st_ino for path in out.rglob("*")} == before


def test_a_finding_that_names_a_folder_elsewhere(tmp_path):
    """The folder of an incident is one folder, whatever a recalled finding is called."""
    folder = folder_of(tmp_path, Finding("../../../etc/x\0", "critical", 3, ""))
    assert folder == tmp_path / "incidents" / "0-3-etcx"
    assert folder_of(tmp_path, Finding("KL_BLOWUP", "critical", 3, "")).name == "0-3-KL_BLOWUP"


def torn(header):
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.safetensors", torn(DEEP.encode())),
        ("a.safetensors", torn(b'{"w": {"data_offsets": [0, "x"]}, "v": {"data_offsets": [0, 4]}}')),
        ("a.safetensors", torn(b'{"w": {"data_offsets": [0, "x"]}}')),
        ("a.safetensors", torn(b'{"w": {"data_offsets": [0, {}]}}')),
        ("a.safetensors", torn(b"[]")),
        ("a.json", DEEP.encode()),
        ("a.json", b"\xff\xfe"),
    ],
)
def test_files_of_a_checkpoint_that_lie(tmp_path, name, data):
    """One complaint, no exception: the guard goes on to an earlier checkpoint."""
    (tmp_path / name).write_bytes(data)
    assert len(list(problems(tmp_path))) == 1


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_that_are_damaged_anywhere(tmp_path, method):
    """Each byte changed in turn: whatever the unpacker raises is a complaint, never an exception."""
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("data.pkl", b"0123456789" * 20)
    whole = path.read_bytes()
    assert list(problems(tmp_path)) == []
    found = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        found += len(list(problems(tmp_path)))
    assert found > len(whole) / 3
