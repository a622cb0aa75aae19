"""Worker processes: they write nothing, hold no lock, say nothing, and end as they would without the guard."""

import copy
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kl_guard import GuardConfig, KLGuard
from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard_torch import TorchGuard
from some_tokens import stats
from streams import blow_up

SCRIPT = Path(__file__).parent / "workers_run.py"


def steps_in(folder):
    return list(recall(read_journal(folder / "kl_guard" / "journal.jsonl")[0]).history.steps)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader(tmp_path, how):
    """They know the guard, and feed, note, save and close it: nothing of it reaches the run's files."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), how], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["blind"]
    assert len(result["seen"]) == 128
    for refused, held, elsewhere in result["seen"]:
        assert refused == (how == "fork")  # a copy in a spawned process has no folder at all
        assert held == 0
        assert elsewhere
    assert "kl-guard" not in done.stderr, done.stderr
    assert steps_in(tmp_path) == list(range(1, result["steps"] + 1))
    assert result["pins"] == ["step-1", "step-9"]
    records, notes = read_journal(tmp_path / "kl_guard" / "journal.jsonl")
    assert not notes
    assert not [r for r in records if r["type"] == "facts" or (r["type"] == "checkpoint" and r["step"] == 10_000)]


FORKED = textwrap.dedent(
    """
    import os, signal, sys, time
    from kl_guard import KLGuard
    guard = KLGuard(output_dir=sys.argv[1])
    guard.observe(1, 0.02)
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b".")
        time.sleep(60)
        sys.exit()
    os.read(begun, 1)  # a child that has not begun yet has let go of nothing
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


def test_a_child_that_outlives_a_killed_run_does_not_lock_the_next_one_out(tmp_path):
    """A server or a loader's worker may stay behind for a while."""
    run = subprocess.Popen([sys.executable, "-c", FORKED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(run.stdout.readline())
    try:
        assert run.wait() == -signal.SIGKILL
        guard = KLGuard(output_dir=tmp_path, announce=False)
        guard.resumed(1)
        guard.observe(2, 0.02)
        assert not guard.refused
        guard.close()
    finally:
        os.kill(child, signal.SIGKILL)
        run.stdout.close()
    assert steps_in(tmp_path) == [1, 2]


def test_a_forked_child_that_ends_in_any_way(tmp_path, caplog):
    """By return, sys.exit, an exception or os._exit, with pins being made in the parent: it ends at once."""
    guard = KLGuard(output_dir=tmp_path)
    guard.observe(1, 0.02)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "weights").write_bytes(os.urandom(1 << 24))
    guard.checkpoint_saved(1, tmp_path / "checkpoint-1")
    context = multiprocessing.get_context("fork")
    for how in (lambda: None, sys.exit, lambda: os._exit(0), guard.close, guard.checkpoints.wait):
        child = context.Process(target=how)
        child.start()
        child.join(20)
        assert child.exitcode == 0
    guard.observe(2, 0.02)
    guard.close()
    assert steps_in(tmp_path) == [1, 2]
    assert (tmp_path / "kl_guard" / "pins" / "step-1").is_dir()
    assert not caplog.records


def test_a_forked_child_may_guard_a_run_of_its_own(tmp_path):
    """As a launcher does that forks a process for each run."""
    guard = KLGuard(output_dir=tmp_path / "parent", announce=False)
    guard.observe(1, 0.02)

    def own():
        inner = KLGuard(output_dir=tmp_path / "child", announce=False)
        inner.observe(1, 0.02)
        inner.close()
        second = KLGuard(output_dir=tmp_path / "parent", announce=False)
        second.observe(1, 0.9)
        sys.exit(0 if second.refused and not inner.blind else 1)

    child = multiprocessing.get_context("fork").Process(target=own)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    guard.observe(2, 0.02)
    guard.close()
    assert steps_in(tmp_path / "child") == [1]
    assert steps_in(tmp_path / "parent") == [1, 2]


@pytest.mark.parametrize(
    "how", [lambda guard: pickle.loads(pickle.dumps(guard)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_copy_of_a_guard_knows_the_run_and_has_no_files(tmp_path, how):
    """It can be asked and fed; folder and lock stay with the guard that it is a copy of."""
    guard = KLGuard(GuardConfig(action="halt"), output_dir=tmp_path, announce=False)
    values = blow_up()
    for step, value in enumerate(values[:45], start=1):
        guard.observe(step, tokens=stats(value))
    twin = how(guard)
    assert list(twin.history) == list(guard.history)
    assert (twin.level, twin.attempt, twin.run_id, twin.folder) == (guard.level, guard.attempt, guard.run_id, None)
    for step, value in enumerate(values[45:60], start=46):
        assert twin.observe(step, tokens=stats(value)).action == guard.observe(step, tokens=stats(value)).action
    assert twin.decision.action == "halt"
    twin.close()
    assert not guard.refused
    guard.close()


def test_a_torch_guard_says_that_it_is_not_to_be_copied(tmp_path):
    """One clear line, with what to do."""
    model = torch.nn.Linear(2, 2)
    guard = TorchGuard(model=model, output_dir=tmp_path)
    for how in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied: leave it out of what a worker is given"):
            how(guard)


def test_a_copy_of_a_callback_is_a_callback_of_the_same_configuration():
    """Lightning and TRL: for trainers that start their processes by spawn."""
    from kl_guard_lightning import KLGuardCallback as ForLightning
    from kl_guard_trl import KLGuardCallback as ForTRL

    for callback in (ForTRL(action="warn", ratio=5.0), ForLightning(action="warn", ratio=5.0, kl_mean="train/kl")):
        for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert type(twin) is type(callback)
            assert twin.config == callback.config
            assert twin.guard is None
    assert twin._logged.asked == {"kl_mean": "train/kl", "kl_max": "kl_max"}
