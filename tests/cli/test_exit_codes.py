"""The exit status of each command, as the documentation has it: scripts go by it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys

import pytest
import torch

from kl_guard import KLGuard
from kl_guard.tokens import summarize_tokens

BLOW_UP = [0.02] * 40 + [0.02 * 1.6**k for k in range(20)]
LINUX = pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="makes a pipe small as Linux does")
SPEAKS = ["--interval", "0.01", "--idle", "0"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A log that blows up, one that does not, and the folders of a run with tokens and of one without."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KL_GUARD_ALERTS", raising=False)
    for name, values in {"bad": BLOW_UP, "good": [0.02] * 60}.items():
        lines = (json.dumps({"step": step, "kl": kl}) for step, kl in enumerate(values, start=1))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("run", "without"):
        guard = KLGuard(output_dir=name, announce=False, alerts=[], token_text=lambda token_id: f"{token_id:064}")
        for step in range(1, 65):
            guard.observe(step, 0.02, tokens=tokens_of(step) if name == "run" else None)
        guard.close()


def tokens_of(step):
    """A batch whose sixteen largest tokens are ones that no other step has."""
    ids = torch.arange(100).reshape(1, 100) + 100 * step
    policy = torch.full((1, 100), -1.0)
    return summarize_tokens(policy, policy - 0.1, torch.ones(1, 100), token_ids=ids)


def run(*arguments):
    """Run a command; return status and what it has printed."""
    command = [sys.executable, "-m", "kl_guard", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("status", "arguments"),
    [
        (0, ["replay", "good.jsonl"]),
        (0, ["replay", "bad.jsonl"]),  # the answer is in what is printed
        (0, ["replay", "bad.jsonl", "good.jsonl", "--json"]),
        (2, ["replay", "nowhere"]),
        (2, ["replay", "bad.jsonl", "--ratio", "0.5"]),
        (2, ["replay", "bad.jsonl", "--report", "nowhere/out.html"]),
        (0, ["watch", "good.jsonl", *SPEAKS]),
        (0, ["watch", "nowhere", *SPEAKS]),  # it might have come
        (1, ["watch", "bad.jsonl", *SPEAKS]),
        (1, ["watch", "bad.jsonl", *SPEAKS, "--on-critical", "exit 7"]),
        (1, ["watch", "bad.jsonl", *SPEAKS, "--halt-on", "warn"]),
        (0, ["watch", "bad.jsonl", *SPEAKS, "--action", "warn"]),  # which only speaks
        (2, ["watch", "run", *SPEAKS]),
        (2, ["watch", "good.jsonl", "--interval", "0"]),
        (0, ["report", "run"]),
        (2, ["report", "nowhere"]),
        (2, ["report", "run", "--output", "nowhere/out.html"]),
        (0, ["tokens", "run"]),
        (0, ["tokens", "run", "--step", "64", "--json"]),
        (2, ["tokens", "nowhere"]),
        (2, ["tokens", "without"]),
        (2, ["tokens", "run", "--step", "999"]),
        (0, ["--version"]),
        (2, []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_status(status, arguments):
    """And where it is 2, one line that says what is wrong."""
    got, out, errors = run(*arguments)
    assert got == status, out + errors
    if status == 2:
        assert out == ""
        assert errors.startswith("kl-guard")
        assert errors.count("\n") == 1


@LINUX
def test_ctrl_c_while_tokens_are_printed():
    """More of them than a pipe holds, so that it stands still in the middle."""
    command = [sys.executable, "-m", "kl_guard", "tokens", "run", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        assert select.select([process.stdout], [], [], 60)[0]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")


@LINUX
def test_ctrl_c_while_a_report_is_written():
    """Into a pipe that nobody empties."""
    os.mkfifo("out.html")
    reader = os.open("out.html", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "kl_guard", "report", "run", "--output", "out.html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert select.select([reader], [], [], 60)[0]
        process.send_signal(signal.SIGINT)
        os.close(reader)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, b"", b"")


@pytest.mark.parametrize("verb", ["replay", "watch"])
def test_a_fault_of_ours_is_no_critical_finding(verb):
    """A script that stops a job on 1 lets it run; the traceback says what to report, and nothing obeys it."""
    code = (
        "import sys, kl_guard.guard\n"
        "def broken(*_, **__): raise LookupError('a \\x1b[2Jbug')\n"
        "kl_guard.guard.KLGuard.take = kl_guard.guard.KLGuard.log = broken\n"
        "from kl_guard.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, verb, "bad.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70
    assert done.stderr.endswith("LookupError: a \\x1b[2Jbug\n")
