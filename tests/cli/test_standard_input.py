"""`kl-guard replay -`: a log that is piped in."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kl_guard import KLGuard

VALUES = [0.02] * 40 + [0.02 * 1.6**k for k in range(20)]
ROWS = [{"step": step, "kl": kl, "loss": 0.1} for step, kl in enumerate(VALUES, start=1)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
REPLAY = [sys.executable, "-m", "kl_guard", "replay"]


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder for temporary files, with a checkpoint of somebody else's in it."""
    folder = tmp_path / "kept"
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "checkpoint-20" / "weights.bin").write_bytes(b"weights")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.chdir(tmp_path)
    yield folder
    assert [path.name for path in folder.iterdir()] == ["checkpoint-20"]


def write(path, kind):
    """A log of a kind."""
    if kind == "jsonl":
        path.write_text(LINES)
    elif kind == "gz":
        path.write_bytes(gzip.compress(LINES.encode()))
    elif kind == "csv":
        path.write_text("step,kl,loss\n" + "".join(f"{r['step']},{r['kl']!r},0.1\n" for r in ROWS))
    elif kind == "console":
        path.write_text("Loading\n" + "".join(f"{row}\n" for row in ROWS))
    elif kind == "trainer_state":
        path.write_text(json.dumps({"log_history": ROWS}, indent=1))
    else:
        guard = KLGuard(output_dir=path.parent / "run", announce=False, alerts=[])
        for row in ROWS:
            guard.observe(row["step"], row["kl"], loss=row["loss"])
        guard.close()
        path.write_bytes((path.parent / "run" / "kl_guard" / "journal.jsonl").read_bytes())
    return path


def piped(given, *arguments):
    """Run with these bytes from a pipe; return status, output and errors."""
    done = subprocess.run([*REPLAY, "-", *arguments], input=given, capture_output=True, timeout=60, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("kind", ["jsonl", "gz", "csv", "console", "trainer_state", "journal"])
def test_it_is_what_the_file_would_be(tmp_path, kind):
    """Whatever kind of log it is; only that nothing lies beside it."""
    path = write(tmp_path / "log", kind)
    command = f"cat log | {' '.join(REPLAY)} - --json"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    there = subprocess.run([*REPLAY, str(path), "--json"], capture_output=True, text=True, check=True)
    told, expected = json.loads(done.stdout), json.loads(there.stdout)
    assert told["action"] == "halt"
    assert (told["log"], told["checkpoint"]) == ("standard input", None)
    assert {**told, "log": ""} == {**expected, "log": ""}


def test_what_is_peculiar_about_it(tmp_path):
    """Is told by its name, not by that of the file it was kept in, in text, report, table and JSON."""
    torn = (LINES + '{"step": 61, "k').encode()
    status, text, errors = piped(torn, "--report", "out.html")
    assert (status, errors) == (0, "")
    assert text.startswith("standard input: 60 observations, steps 1 to 60; KL is read from 'kl' (k3)")
    assert "note: standard input: line 61 is torn" in text
    status, table, errors = piped(torn, "--sweep", "ratio=4,8")
    assert table.splitlines()[1].split()[:4] == ["standard", "input", "4.0", "60"]
    assert "note: standard input: line 61 is torn" in errors
    page = Path("out.html").read_text()
    assert "standard input" in page
    assert "kl-guard-" not in text + table + errors + page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "standard input: empty, so neither JSON nor a CSV file"),
        (b'{"step": 1, "loss": 0.1}\n', "standard input: no KL in this log; it has: loss, step"),
        (LINES.encode() + b"{no\n" * 60, "standard input: line 61 is not JSON"),
    ],
)
def test_what_is_no_log(given, message):
    """One line, status 2."""
    status, text, errors = piped(given)
    assert (status, text) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1
    assert "kl-guard-" not in errors


def test_beside_files(tmp_path):
    """In a table with them, but only once."""
    write(tmp_path / "run.jsonl", "jsonl")
    status, table, _ = piped(LINES.encode(), "run.jsonl")
    assert status == 0
    assert [row.split()[0] for row in table.splitlines()[1:]] == ["standard", "run.jsonl"]
    status, _, errors = piped(LINES.encode(), "-")
    assert (status, errors) == (2, "kl-guard: error: -, which is standard input, can be given once\n")


def test_a_file_of_that_name(tmp_path):
    """Is called ./-."""
    write(tmp_path / "-", "jsonl")
    done = subprocess.run([*REPLAY, "./-", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["log"] == "./-"


def test_standard_input_that_is_closed():
    """One line."""
    command = ["bash", "-c", f"{' '.join(REPLAY)} - <&-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "kl-guard: error: standard input is closed\n")


def test_ctrl_c_while_nothing_comes(kept):
    """Status 130, nothing said, nothing left."""
    with subprocess.Popen([*REPLAY, "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(kept.glob("kl-guard-*/*")):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")


def test_watch_takes_no_pipe():
    """Its end would be that of the training."""
    read, write_end = os.pipe()
    command = [sys.executable, "-m", "kl_guard", "watch", "-"]
    done = subprocess.run(command, stdin=read, capture_output=True, text=True, timeout=60, check=False)
    os.close(write_end)
    assert done.returncode == 2
    assert "watch takes a file: at its end a pipe would break" in done.stderr
    assert done.stderr.count("\n") == 1
