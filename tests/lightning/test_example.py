"""The example that the README shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from blocks import not_in, text_with

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_it_blows_up_and_comes_back(tmp_path):
    """A real run that is taken back and ends healthy, and would not have without the guard."""
    command = [sys.executable, str(EXAMPLES / "lightning_rlhf.py"), "--output-dir", str(tmp_path)]
    run = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "As expected" in run.stdout
    assert "back to step 50" in run.stdout
    output = (run.stdout + run.stderr).replace(str(tmp_path), "lightning-output")
    assert not not_in(output, text_with("lightning-output")), "README shows something else"
