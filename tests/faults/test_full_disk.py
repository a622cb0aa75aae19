"""A disk that is full: training goes on, the decision comes all the same, and what was written before stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kl_guard.journal import read_journal
from kl_guard.memory import recall

TROUBLE = 90  # of the script
SCRIPT = Path(__file__).parent / "full_disk_run.py"


@pytest.fixture
def small_disk(tmp_path):
    """A folder, and how it is filled: a file system of 400 kB, or a limit on files for those who may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True)
    yield folder, "limit" if mount.returncode else "fill"
    if mount.returncode == 0:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run(folder, how):
    """What the script says."""
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder), how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(folder, result):
    """The same decision as ever, said once what is wrong, and all observations in the end."""
    assert TROUBLE < result["halted"] == result["expected"]
    assert not result["blind"]
    wrong = [text for text in result["said"] if "cannot write" in text]
    assert len([text for text in wrong if "tokens.jsonl" not in text]) == 1, wrong
    assert len(wrong) <= 2
    assert len(result["said"]) <= 12, result["said"]
    records, notes = read_journal(folder / "kl_guard" / "journal.jsonl")
    assert list(recall(records).history.steps) == list(range(1, 161))
    assert len(notes) <= 1
    assert [r["finding"]["signature"] for r in records if r["type"] == "finding"].count("KL_BLOWUP") == 1


def test_a_full_disk(small_disk):
    """No byte is left from step 40 to 120."""
    folder, how = small_disk
    result = run(folder, how)
    assert result["present"] > 10_000
    check(folder, result)


def test_no_file_may_grow(tmp_path):
    """A limit on the size of files, as a batch system sets it, refuses the same way."""
    folder = tmp_path / "run"
    folder.mkdir()
    check(folder, run(folder, "limit"))
