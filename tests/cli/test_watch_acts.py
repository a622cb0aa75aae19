"""What `kl-guard watch` is there for happens whatever becomes of its output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alert_receiver import receiver

VALUES = [0.02] * 40 + [0.02 * 1.6**k for k in range(20)]
WATCH = f"{sys.executable} -m kl_guard watch run.jsonl --interval 0.01 --idle 0"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A log that blows up after a line that cannot be read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KL_GUARD_ALERTS", raising=False)
    lines = [json.dumps({"step": step, "kl": kl}) for step, kl in enumerate(VALUES, start=1)]
    Path("run.jsonl").write_text("\n".join([*lines[:9], "{no", *lines[9:]]) + "\n")


def shell(command):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param("> /dev/full", marks=FULL),
        pytest.param("2> /dev/full", marks=FULL),
        pytest.param("> /dev/full 2>&1", marks=FULL),
        "| head -1",
        "| true",
        "2>&1 | true",
        ">&-",
        "2>&-",
    ],
)
def test_the_command_runs_and_the_status_is_one(output):
    """Once, with output that is full, closed, or read by nobody."""
    done = shell(f"{WATCH} --on-critical 'echo $KL_GUARD_SIGNATURE >> seen' {output}; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 1, done.stderr
    assert Path("seen").read_text() == "KL_BLOWUP\n"
    assert "Traceback" not in done.stderr


@FULL
def test_the_alert_goes_out():
    """To the service that stands for all others here: a server of this test."""
    pytest.importorskip("apprise")
    with receiver() as service:
        done = shell(f"{WATCH} --alert {service.url} > /dev/full")
        assert done.returncode == 1, done.stderr
        assert len(service.posts) == 1


@pytest.mark.parametrize("action", ["warn", "halt", "rollback"])
def test_the_command_runs_whatever_the_action_is(action):
    """Under `warn` the watch goes on afterwards, and further critical findings do not run it again."""
    command = [*WATCH.split(), "--action", action, "--on-critical", "echo $KL_GUARD_SIGNATURE >> seen"]
    with Path("run.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": 61 + k, "kl": "Infinity", "grad_norm": "NaN"}) + "\n" for k in range(9))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if action == "warn" else 1), done.stderr
    assert done.stdout.count("(critical)") == (2 if action == "warn" else 1)
    assert Path("seen").read_text() == "KL_BLOWUP\n"
    assert done.stderr.count("the command ended with 0") == 1


@FULL
@pytest.mark.parametrize("streams", ["2> /dev/full", "> /dev/full 2>&1"])
def test_a_usage_error_that_cannot_be_printed_is_one_still(streams):
    """A script may take 1 for a critical finding."""
    assert shell(f"{sys.executable} -m kl_guard replay nowhere {streams}").returncode == 2
    assert shell(f"{sys.executable} -m kl_guard play {streams}").returncode == 2
