"""Two guards in one folder: one of them writes it, the other says so and keeps its hands off."""

import logging
import subprocess
import sys
import textwrap

import pytest
import torch

from kl_guard import GuardConfig, KLGuard
from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard_torch import TorchGuard

OTHER = textwrap.dedent(
    """
    import sys, torch
    from kl_guard_torch import TorchGuard
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = TorchGuard(model=model, optimizer=optimizer, output_dir=sys.argv[1], keep=1)
    guard.resume(fresh=True)
    guard.step(1, 0.02)
    guard.save(1)
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(2, 5):
        guard.step(step, 0.02)
    guard.close()
    print(guard.guard.refused, flush=True)
    """
)


def torch_guard(folder, **more):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TorchGuard(model=model, optimizer=optimizer, output_dir=folder, keep=1, **more)


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_two_processes(tmp_path, caplog):
    """The second one watches and halts, and deletes, renames and pins nothing of the first."""
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "ready\n"
        (tmp_path / ".saving-checkpoint-2").mkdir()  # which the first is writing just now
        with torch_guard(tmp_path, action="halt") as guard:
            assert guard.resume(fresh=True) == 0
            for step in range(1, 60):
                decision = guard.step(step, 0.02 * 1.6 ** max(0, step - 30))
                if step in {20, 21}:
                    assert guard.save(step) is not None
                if decision:
                    break
            assert decision.action == "halt"
        assert (tmp_path / "checkpoint-1").is_dir()
        assert (tmp_path / ".saving-checkpoint-2").is_dir()
        assert not (tmp_path / "kl_guard" / "pins" / "step-20").exists()
        assert len([text for text in said(caplog) if "another guard is writing" in text]) == 1
        out, _ = other.communicate("\n")
        assert out == "False\n"
    finally:
        other.kill()
        other.wait()
    assert list(recall(read_journal(tmp_path / "kl_guard" / "journal.jsonl")[0]).history.steps) == [1, 2, 3, 4]


def test_two_guards_of_one_process(tmp_path, caplog):
    """The newer one has the folder; the older one says so once, and writes, pins and deletes nothing any more."""
    older = torch_guard(tmp_path)
    older.resume()
    older.step(1, 0.02)
    older.save(1)
    newer = torch_guard(tmp_path)
    assert newer.resume() == 1
    newer.step(2, 0.02)
    newer.save(2)
    newer.guard.checkpoints.wait()
    before = read_journal(tmp_path / "kl_guard" / "journal.jsonl")[0]
    older.step(2, 0.5)
    older.step(3, 0.5)
    assert older.save(3) is not None
    older.guard.checkpoints.wait()
    assert read_journal(tmp_path / "kl_guard" / "journal.jsonl")[0] == before
    assert (tmp_path / "checkpoint-2").is_dir()
    pins = {path.name for path in (tmp_path / "kl_guard" / "pins").glob("step-*")}
    assert pins == {"step-1", "step-2"}
    assert [text for text in said(caplog) if "a newer guard of this process" in text] == [
        f"kl-guard: a newer guard of this process is writing {tmp_path / 'kl_guard'}; this one watches, but keeps no "
        f"journal and no checkpoints"
    ]
    older.close()
    newer.step(3, 0.02)
    newer.close()
    assert not newer.guard.refused
    assert list(recall(read_journal(tmp_path / "kl_guard" / "journal.jsonl")[0]).history.steps) == [1, 2, 3]


@pytest.mark.parametrize("spelled", [lambda p: p, lambda p: p / ".." / p.name], ids=["the same", "otherwise spelled"])
def test_the_newer_one_decides_for_itself(tmp_path, spelled):
    """What the older one goes on saying is its own: findings, incident and decision are not mixed."""
    older = KLGuard(GuardConfig(action="halt"), output_dir=tmp_path, announce=False)
    older.observe(1, 0.02)
    newer = KLGuard(GuardConfig(action="halt"), output_dir=spelled(tmp_path), announce=False)
    for step in range(1, 60):
        newer.observe(step, 0.02)
        older.observe(step + 1, 0.02 * 1.6 ** max(0, step - 30))
    assert older.decision.action == "halt"
    assert newer.decision.action == "continue"
    assert not (tmp_path / "kl_guard" / "incidents").exists()
    older.close()
    newer.close()
    memory = recall(read_journal(tmp_path / "kl_guard" / "journal.jsonl")[0])
    assert memory.run_id == newer.run_id
    assert not memory.findings


def test_a_folder_that_was_closed_is_free(tmp_path, caplog):
    """One after the other, nobody is refused, and nothing is said."""
    for number in range(3):
        with torch_guard(tmp_path) as guard:
            guard.resume()
            guard.step(number + 1, 0.02)
            guard.save(number + 1)
    assert not [text for text in said(caplog) if "guard" in text and "writing" in text]
    assert list(recall(read_journal(tmp_path / "kl_guard" / "journal.jsonl")[0]).history.steps) == [1, 2, 3]
