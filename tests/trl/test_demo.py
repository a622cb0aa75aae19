"""What `make demo` runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_demo_passes_and_halts(tmp_path, encoding):
    """A healthy run passes, a run whose learning rate is raised is halted; both on any terminal."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT / "examples")]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, str(ROOT / "examples" / "trl_grpo.py"), "--output-dir", str(tmp_path / "out")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    for part in ("halted: False; findings: 0", "by KL_BLOWUP", "go back to: ", "As expected"):
        assert part in run.stdout
    assert "the learning rate was raised" in run.stdout
    assert (tmp_path / "out" / "blow-up" / "kl_guard" / "journal.jsonl").is_file()
