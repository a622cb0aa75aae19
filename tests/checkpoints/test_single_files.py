"""Checkpoints that are one file, whose name may come again: pinned, taken away, put back, moved aside."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from kl_guard import GuardConfig, KLGuard


def save(path, content):
    """Write what looks like a file of `torch.save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", content)
    return path


def guard_of(tmp_path, **knobs):
    return KLGuard(GuardConfig(action="rollback", **knobs), output_dir=tmp_path, announce=False)


def blow_up(guard, begin=30):
    """Observe a calm run that blows up; return the decision."""
    for step in range(guard.history.steps[-1] + 1 if len(guard.history) else 1, begin + 40):
        decision = guard.observe(step=step, kl_mean=0.02 if step < begin else 0.02 * 1.6 ** (step - begin))
        if decision:
            return decision
    return decision


def test_a_file_is_pinned_and_found_when_rotation_took_it(tmp_path):
    """The pin holds the file under its own name, and is what a decision names."""
    guard = guard_of(tmp_path)
    guard.observe(step=1, kl_mean=0.02)
    file = save(tmp_path / "checkpoints" / "step=1.ckpt", "one")
    content = file.read_bytes()
    guard.checkpoint_saved(1, file)
    file.unlink()
    decision = blow_up(guard)
    assert decision.action == "rollback"
    assert [p.name for p in Path(decision.checkpoint.path).glob("*.ckpt")] == ["step=1.ckpt"]
    back = guard.go_back(lambda _: file)
    guard.rolled_back(back.step)
    assert file.read_bytes() == content  # put back where the trainer had it
    guard.close()


def test_without_pins_the_file_itself_is_the_way_back(tmp_path):
    """A file that is cut short or empty is not."""
    for broken in (False, True):
        guard = guard_of(tmp_path / str(broken), pin_checkpoints=False)
        guard.observe(step=1, kl_mean=0.02)
        file = save(tmp_path / str(broken) / "step=1.ckpt", "one" * 100)
        guard.checkpoint_saved(1, file)
        if broken:
            os.truncate(file, 50)
        decision = blow_up(guard)
        assert decision.action == ("halt" if broken else "rollback")
        assert broken or decision.checkpoint.path == str(file)
        guard.close()


def test_a_damaged_file_is_noticed_without_a_manifest(tmp_path):
    """A `.ckpt` is a zip archive, and has checksums of its own."""
    guard = guard_of(tmp_path, pin_checkpoints=False)
    guard.observe(step=1, kl_mean=0.02)
    file = save(tmp_path / "step=1.ckpt", "one" * 100)
    guard.checkpoint_saved(1, file)
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    file.write_bytes(content)
    assert blow_up(guard).action == "halt"
    guard.close()


def test_a_name_that_comes_again_is_the_latest_checkpoint_only(tmp_path):
    """`last.ckpt` of a later step is no way back to an earlier one, and is moved aside as what it is."""
    guard = guard_of(tmp_path)
    last = tmp_path / "last.ckpt"
    contents = {}
    for step in range(1, 33):
        guard.observe(step=step, kl_mean=0.02)
        if step % 8 == 0:
            contents[step] = save(last, f"state at {step}").read_bytes()
            guard.checkpoint_saved(step, last)
    decision = blow_up(guard, begin=20)
    assert decision.checkpoint.step < 32
    back = guard.go_back(lambda _: last)
    guard.rolled_back(back.step)
    assert last.read_bytes() == contents[back.step]
    aside = tmp_path / "kl_guard" / "quarantine" / "attempt-0-last.ckpt"
    assert aside.read_bytes() == contents[32]
    guard.close()


def test_a_restarted_process_knows_it_too(tmp_path):
    """The journal has every save; only the last one under a name is there."""
    guard = guard_of(tmp_path, pin_checkpoints=False)
    for step in range(1, 25):
        guard.observe(step=step, kl_mean=0.02)
        if step % 8 == 0:
            guard.checkpoint_saved(step, save(tmp_path / "last.ckpt", f"state at {step}"))
    guard.close()
    again = guard_of(tmp_path, pin_checkpoints=False)
    again.resumed(24)
    paths = {checkpoint.step: checkpoint.path for checkpoint in again.checkpoints}
    assert paths[24] == str(tmp_path / "last.ckpt")
    assert not any(Path(paths[step]).exists() for step in (8, 16))
    again.close()
