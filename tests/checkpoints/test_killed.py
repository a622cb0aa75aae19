"""SIGKILL at any moment around saving, pinning, quarantine and rollback, and again after each restart."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kl_guard.checkpoints import PinStore
from kl_guard.journal import read_journal
from kl_guard.memory import recall

SCRIPT = Path(__file__).parent / "killed_run.py"
FIRST_TROUBLE = 32


def ids_below(folder):
    """The names of all complete checkpoints and pins there are, wherever they were moved."""
    return {path.read_text() for path in folder.rglob("id") if not path.parent.name.startswith(".draft")}


def events(folder):
    """What the run itself wrote down, in order."""
    lines = (folder / "trainer.log").read_text().splitlines() if (folder / "trainer.log").exists() else []
    return [line.split(maxsplit=2) for line in lines]


def check(folder):
    """What must hold after a kill."""
    path = folder / "kl_guard" / "journal.jsonl"
    if not path.exists():
        return None
    memory = recall(read_journal(path)[0])
    store = PinStore(folder / "kl_guard" / "pins", memory.run_id)
    store.clean()
    pins = store.pins()
    assert all(store.sound(pin) for pin in pins)
    saved = {e[2] for e in events(folder) if e[0] == "saved"}
    rotated = {e[2] for e in events(folder) if e[0] == "rotated"}
    assert saved - rotated <= ids_below(folder), "a checkpoint is gone that the trainer did not delete"
    if any(e[0] == "pinned" for e in events(folder)):
        assert min(pin.step for pin in pins) < FIRST_TROUBLE - 1
    assert memory.attempt == memory.rollbacks <= 2
    return memory


def kill_at_random(tmp_path, kills, seed=0):
    """Start, kill, check, start again; a run that has ended makes room for a new one. Return how many ended."""
    rng = random.Random(seed)
    ended = number = 0
    folder = tmp_path / "0"
    folder.mkdir()
    for _ in range(kills):
        run = subprocess.Popen([sys.executable, str(SCRIPT), str(folder)], stdout=subprocess.PIPE, text=True)
        run.stdout.readline()
        time.sleep(rng.uniform(0, 0.12) if rng.random() < 0.9 else 1)
        run.send_signal(signal.SIGKILL)
        code = run.wait()
        run.stdout.close()
        assert code in {0, -signal.SIGKILL}
        memory = check(folder)
        last = events(folder)[-1][0] if events(folder) else ""
        if last in {"finished", "halted"}:
            assert last == "finished"
            assert memory.rollbacks == 2
            first, second = backs(folder)
            assert first < 31
            assert second < 46
            ended += 1
            shutil.rmtree(folder)
            number += 1
            folder = tmp_path / str(number)
            folder.mkdir()
    return ended


def backs(folder):
    """To which steps the run was taken back."""
    records, _ = read_journal(folder / "kl_guard" / "journal.jsonl")
    return [record["to_step"] for record in records if record["type"] == "rollback"]


def test_killed_at_any_moment(tmp_path):
    """A way back at all times, no torn pin, nothing lost; and the runs end as if nothing had been (200 in the soak)."""
    kill_at_random(tmp_path, 12)


@pytest.mark.soak
def test_killed_at_two_hundred_moments(tmp_path):
    """Two hundred of two hundred."""
    assert kill_at_random(tmp_path, 200, seed=1) >= 10
