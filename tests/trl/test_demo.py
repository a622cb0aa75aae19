"""The examples: what `make demo` runs, and the run that is taken back."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import DOCS, README, not_in, text_with

pytestmark = pytest.mark.newest  # works on both; once is enough
ROOT = Path(__file__).parent.parent.parent


def example(name, *arguments, encoding="utf-8"):
    """Run an example; return its result."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT / "examples")]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_demo_passes_and_halts(tmp_path, encoding):
    """A healthy run passes, a run whose learning rate is raised is halted; both on any terminal."""
    run = example("trl_grpo.py", "--output-dir", tmp_path / "out", encoding=encoding)
    assert run.returncode == 0, run.stderr[-3000:]
    for part in ("halted: False; findings: 0", "by KL_BLOWUP", "go back to: ", "As expected"):
        assert part in run.stdout
    assert "the learning rate was raised" in run.stdout
    assert (tmp_path / "out" / "blow-up" / "kl_guard" / "journal.jsonl").is_file()
    output = (run.stdout + run.stderr).replace(str(tmp_path / "out"), "demo-output")
    assert not not_in(output, text_with("demo-output")), "README shows something else"


def test_the_rollback_example_ends_healthy(tmp_path):
    """Ten times too high a learning rate: it blows up, goes back by itself, and finishes under the threshold."""
    run = example("trl_rollback.py", "--output-dir", tmp_path / "out")
    assert run.returncode == 0, run.stderr[-3000:]
    assert "back at step" in run.stderr
    assert re.search(r"Final KL: 0\.[0-4]\d+ as the guard left it, \d\.\d+ without going back", run.stdout)
    assert (tmp_path / "out" / "guarded" / "final" / "model.safetensors").is_file()
    output = (run.stdout + run.stderr).replace(str(tmp_path / "out"), "rollback-output")
    for page in (README, DOCS / "rollback.md"):
        assert not not_in(output, text_with("rollback-output", page)), f"{page} shows something else"


@pytest.mark.soak
def test_rollback_saves_four_of_five_seeds(tmp_path):
    """At least; each loses the race without the guard."""
    run = example("trl_rollback.py", "--output-dir", tmp_path / "out", "--seeds", 5)
    assert int(re.search(r"s expected \((\d) of 5 seeds\)", run.stdout)[1]) >= 4, run.stdout
