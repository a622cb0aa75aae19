"""Running a script of a folder of tests in processes of its own, alone or by torchrun on two gloo ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent


def launch(script, *arguments, folder="trl", processes=2, timeout=300, path=()):
    """Run a script; return the results it printed, and its other output."""
    paths = [str(HERE.parent / "examples"), str(HERE), *map(str, path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(runner if processes > 1 else []), str(HERE / folder / script), *map(str, arguments)]
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = run.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(run.pid).children(recursive=True), run]:  # ranks are in groups of their own
            process.send_signal(signal.SIGKILL)
        out, errors = run.communicate()
        pytest.fail(f"it hangs; last lines:\n{out[-2000:]}\n{errors[-2000:]}")
    assert run.returncode == 0, errors[-4000:]
    results = re.findall(r"RESULT (.*?)(?=RESULT |\n|$)", out)  # of two ranks two may stand in one line
    return [json.loads(result) for result in results], errors
