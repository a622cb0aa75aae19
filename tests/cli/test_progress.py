"""A bar for who waits at a terminal; nothing anywhere else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from kl_guard.checkpoints.manifest import checksum, size_of
from kl_guard.checkpoints.soundness import problems
from kl_guard.progress import counted, unseen
from terminals import AT_ONCE, COMMAND, OnTerminal

ROWS = 3_000


def write(path, rows=ROWS):
    path.write_text("".join(f'{{"step": {step}, "kl": 0.02}}\n' for step in range(1, rows + 1)))
    return path


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "run.jsonl")


def test_a_long_replay_shows_a_bar(log):
    """On standard error, by the bytes read; it is gone at the end, and the output is what it is without."""
    status, out, shown = OnTerminal(COMMAND, "replay", log, COLUMNS="80").finish()
    command, environment = [sys.executable, "-c", COMMAND, "replay", log], {**os.environ, "COLUMNS": "80"}
    piped = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert (status, out) == (0, piped.stdout)
    assert "reading " in shown
    assert max(map(int, re.findall(r"(\d+)%", shown))) > 50
    assert shown.endswith("\x1b[2K")
    assert "\x1b[?25l" not in shown  # the cursor stays: a killed process would leave the terminal without
    assert piped.stderr == ""
    assert "\x1b" not in piped.stdout


@pytest.mark.parametrize("kind", ["csv", "json", "gz", "mlflow", "sweep"])
def test_whatever_is_read(tmp_path, kind):
    """A table, a log history, a compressed file, a table by metric, a log held for a sweep."""
    import gzip
    import json

    path = tmp_path / f"run.{kind}"
    rows = [{"step": step, "kl": 0.02} for step in range(1, ROWS + 1)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "csv":
        path.write_text("step,kl\n" + "".join(f"{step},0.02\n" for step in range(1, ROWS + 1)))
    elif kind == "mlflow":
        path.write_text("key,value,step\n" + "".join(f"kl,0.02,{step}\n" for step in range(1, ROWS + 1)))
    elif kind == "json":
        path.write_text(json.dumps({"log_history": rows}, indent=1))
    elif kind == "gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    more = ["--sweep", "ratio=4,8"] if kind == "sweep" else []
    status, _, shown = OnTerminal(COMMAND, "replay", path, *more).finish()
    assert status == 0
    assert "%" in shown
    assert ("2 times" in shown) == (kind == "sweep")


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_it_fits(log, columns):
    """One line, however narrow the terminal is."""
    _, _, shown = OnTerminal(COMMAND, "replay", log, columns=columns).finish()
    pictures = re.split(r"[\r\n]|\x1b\[2K|\x1b\[1A", shown)
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", picture) for picture in pictures]
    assert any("%" in picture for picture in plain)
    assert all(len(picture) <= columns for picture in plain)
    assert shown.count("\x1b[1A") == 1  # at the end, to take it away


def test_without_colour(log):
    """NO_COLOR is a bar in one colour; a dumb terminal has none."""
    _, _, shown = OnTerminal(COMMAND, "replay", log, NO_COLOR="1").finish()
    assert "%" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", shown)
    assert OnTerminal(COMMAND, "replay", log, TERM="dumb").finish()[2] == ""


def test_short_work_shows_nothing(tmp_path):
    """A bar that flickers helps nobody."""
    log = write(tmp_path / "run.jsonl", 300)
    code = COMMAND.replace("PATIENCE = 0", "PATIENCE = 60")
    assert OnTerminal(code, "replay", log).finish()[2] == ""


def test_a_name_is_text(tmp_path):
    """Neither markup nor escape sequences of a name do anything."""
    log = write(tmp_path / "[red]x[-red] {} \x1b[2J.jsonl")
    status, _, shown = OnTerminal(COMMAND, "replay", log).finish()
    assert status == 0
    assert "reading [red]x[-red] {} ?[2J.jsonl" in shown
    assert "\x1b[2J" not in shown


def test_ctrl_c_takes_the_bar_away(tmp_path):
    """Status 130, no traceback, a clean line."""
    run = OnTerminal(COMMAND, "replay", write(tmp_path / "run.jsonl", 300_000))
    assert "%" in run.read_until("%")
    run.process.send_signal(signal.SIGINT)
    status, out, shown = run.finish()
    assert (status, out) == (130, "")
    assert "Traceback" not in shown
    assert shown.endswith("\x1b[2K")


ROLLBACK = (
    AT_ONCE
    + """
import pathlib, sys
from kl_guard import GuardConfig, KLGuard
out = pathlib.Path(sys.argv[1])
guard = KLGuard(GuardConfig(action="rollback"), output_dir=out, rank=int(sys.argv[2]))
for step, kl in enumerate([0.02] * 40 + [0.02 * 1.6**k for k in range(20)], start=1):
    decision = guard.observe(step, kl)
    if step == 20:
        (out / "checkpoint-20").mkdir(parents=True)
        (out / "checkpoint-20" / "model.bin").write_bytes(bytes(5_000_000))
        guard.checkpoint_saved(20, out / "checkpoint-20")
    if decision:
        break
print(decision.action, decision.checkpoint and decision.checkpoint.step)
guard.close()
"""
)


def test_a_rollback_that_waits_for_checksums(tmp_path):
    """The way back is compared with its manifest: shown by one process, on a terminal only."""
    status, out, shown = OnTerminal(ROLLBACK, tmp_path / "a", 0).finish()
    assert (status, out) == (0, "rollback 20\n")
    assert "checking the pin of step 20" in shown
    assert "checking" not in OnTerminal(ROLLBACK, tmp_path / "b", 1).finish()[2]
    command = [sys.executable, "-c", ROLLBACK, str(tmp_path / "c"), "0"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "checking" not in piped.stderr
    assert "rollback 20" in piped.stdout


def test_bytes_add_up(tmp_path):
    """To the size of what is read, with or without a manifest."""
    import torch

    (tmp_path / "model.safetensors.index.json").write_text("{}")
    torch.save({"w": torch.zeros(3_000_000)}, tmp_path / "optimizer.pt")
    told = []
    assert list(problems(tmp_path, on_bytes=counted(told.append, size_of(tmp_path)))) == []
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0, abs=0.01)
    read = []
    assert checksum(tmp_path / "optimizer.pt", read.append) == checksum(tmp_path / "optimizer.pt")
    assert sum(read) == (tmp_path / "optimizer.pt").stat().st_size


def test_nothing_is_counted_where_nothing_is_shown():
    """No cost for nobody."""
    with unseen("work") as told:
        assert counted(told, 5) is told


def test_a_terminal_that_is_gone_costs_the_bar_only(monkeypatch):
    """Whatever the terminal refuses."""
    from kl_guard import progress

    class Gone:
        encoding = "utf-8"

        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Gone())
    monkeypatch.setattr(progress, "PATIENCE", 0)
    monkeypatch.setenv("TERM", "xterm")
    with progress.on_terminal("work") as told:
        told(0.5)
        told(1.0)
