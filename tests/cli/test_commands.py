"""The commands as a user calls them: processes of their own, their output and exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kl_guard import KLGuard, replay
from kl_guard.cli import main
from kl_guard.cli.curve import BLOCKS, sparkline

VALUES = [0.02] * 40 + [0.02 * 1.6**k for k in range(20)]


def kl_guard(*arguments, **environment):
    """Run the command; return status, output and errors."""
    command = [sys.executable, "-m", "kl_guard", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    return run.returncode, run.stdout, run.stderr


def write(path, values=VALUES, **more):
    path.write_text("".join(json.dumps({"step": i, "kl": v, **more}) + "\n" for i, v in enumerate(values, start=1)))
    return path


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "run.jsonl")


def make_checkpoints(folder, steps):
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "weights.bin").write_bytes(b"weights")


def test_when_should_i_have_stopped(log):
    """The step, from where on, where to go back to, and what it would have saved."""
    make_checkpoints(log.parent, [20, 38, 40, 50])
    (log.parent / "checkpoint-38" / "weights.bin").write_bytes(b"")  # torn
    status, text, errors = kl_guard("replay", log, "--hours", 6, "--cost-per-hour", 100)
    assert (status, errors) == (0, "")
    flat = " ".join(text.split())
    assert "KL is read from 'kl' (k3)" in flat
    assert "Stop at step 51: 9 steps were made after it." in flat
    assert "left its own regime at about step 41" in flat
    assert f"Go back to {log.parent / 'checkpoint-20'}" in flat
    assert "would have saved 0.9 hours, at this price 90.00" in flat


def test_json_says_the_same(log):
    """One object, with every finding."""
    status, text, _ = kl_guard("replay", log, "--json")
    told = json.loads(text)
    expected = replay(VALUES)
    assert status == 0
    assert (told["fired_at"], told["onset_step"], told["departure_step"]) == (
        expected.fired_at,
        expected.onset_step,
        expected.departure_step,
    )
    assert [f["signature"] for f in told["findings"]] == [f.signature for f in expected.findings]
    assert told["kl"] == {"name": "kl", "kind": "k3", "others": []}
    assert told["steps_after"] == 60 - expected.fired_at


def test_every_knob_is_a_flag(log):
    """With its own check, by name."""
    assert json.loads(kl_guard("replay", log, "--json", "--abs-floor", 1e6, "--hard-ceiling", "inf")[1])["action"] == (
        "continue"
    )
    assert json.loads(kl_guard("replay", log, "--json", "--action", "warn")[1])["fired_at"] is None
    status, _, errors = kl_guard("replay", log, "--ratio", 0.5)
    assert (status, errors) == (2, "kl-guard: error: ratio must be a finite number above 1, got 0.5\n")


def test_a_sweep_is_a_table(log, tmp_path):
    """Every combination for every log, one line each; the same numbers as single replays."""
    healthy = write(tmp_path / "healthy.jsonl", [0.02] * 60)
    status, text, _ = kl_guard("replay", log, healthy, "--sweep", "ratio=4,50", "abs_floor=0.1", COLUMNS="160")
    rows = [line.split() for line in text.splitlines()]
    assert status == 0
    assert rows[0][:3] == ["log", "ratio", "abs_floor"]
    assert [row[:3] for row in rows[1:]] == [
        ["run.jsonl", "4.0", "0.1"],
        ["run.jsonl", "50.0", "0.1"],
        ["healthy.jsonl", "4.0", "0.1"],
        ["healthy.jsonl", "50.0", "0.1"],
    ]
    for row, ratio in zip(rows[1:3], (4, 50), strict=True):
        assert int(row[4]) == replay(VALUES, ratio=ratio, abs_floor=0.1).fired_at
    assert rows[3][4] == "-"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["play"], "invalid choice: 'play'"),
        (["replay"], "the following arguments are required: LOG"),
        (["replay", "nowhere"], "nowhere: No such file or directory"),
        (["replay", "{log}", "--key", "kel"], "there is no 'kel'; there are: kl, step"),
        (["replay", "{log}", "--sweep", "ratio"], "--sweep takes KNOB=VALUE,VALUE"),
        (["replay", "{log}", "--sweep", "ratio=4,x"], "ratio must be a number, got 'x'"),
        (["replay", "{log}", "--hours", "-1"], "must be a number above 0 and at most 1e9, got '-1'"),
        (["watch", "{log}", "--interval", "0"], "--interval must be a number above 0"),
    ],
)
def test_usage_errors_are_one_line_and_two(log, arguments, message):
    """What was wrong, in one line, and status 2."""
    status, text, errors = kl_guard(*(str(a).replace("{log}", str(log)) for a in arguments))
    assert (status, text) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("columns", [20, 40, 100])
def test_narrow_terminals(log, columns):
    """No line of words is longer than the terminal is wide."""
    _, text, _ = kl_guard("replay", log, COLUMNS=str(columns))
    assert all(len(line) <= columns or " " not in line.strip() for line in text.splitlines())


def test_nothing_of_a_log_reaches_the_terminal_as_a_command(tmp_path):
    """Escape sequences in names are shown, not obeyed."""
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({"step": i, "kl": v, "x\x1b[2J - kl": v}) + "\n" for i, v in enumerate(VALUES)))
    _, text, _ = kl_guard("replay", path)
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_colour_only_where_it_is_wanted(log, monkeypatch, capsys):
    """On a terminal, unless NO_COLOR is set; never in a pipe."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["replay", str(log)]) == 0
    assert "\x1b[31;1m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["replay", str(log)])
    assert "\x1b" not in capsys.readouterr().out


def test_a_terminal_of_ascii(log):
    """The curve is drawn with what there is."""
    status, text, errors = kl_guard("replay", log, PYTHONIOENCODING="ascii")
    assert (status, errors) == (0, "")
    assert text.isascii()
    assert "KL  _" in text


def test_a_reader_that_has_seen_enough(log):
    """`| head -1` is no error."""
    command = f"{sys.executable} -m kl_guard replay {log} {log} {log} | head -1"
    run = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def watch(path, *arguments, cwd=None):
    """Start to watch."""
    command = [sys.executable, "-m", "kl_guard", "watch", str(path), "--interval", "0.05", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)


def append(path, rows):
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "kl": kl}) + "\n" for step, kl in rows)


def test_watch_follows_and_acts(tmp_path):
    """A log that comes late, is rotated, and blows up: the command runs with the facts, and the status is 1."""
    path = tmp_path / "run.jsonl"
    run = watch(path, "--on-critical", 'echo "$KL_GUARD_SIGNATURE $KL_GUARD_STEP $KL_GUARD_LOG"')
    append(path, enumerate(VALUES[:40], start=1))
    time.sleep(1.5)
    path.rename(tmp_path / "run.jsonl.1")
    append(path, enumerate(VALUES[40:], start=41))
    out, errors = run.communicate(timeout=30)
    assert run.returncode == 1, errors
    guard = KLGuard(announce=False)  # which does not know how long the run will be, as replay does
    fired = next(step for step, kl in enumerate(VALUES, start=1) if guard.observe(step, kl))
    assert f"KL_BLOWUP {fired} {path}" in out
    assert f"KL_BLOWUP (critical) at step {fired}" in " ".join(out.split())


def test_nothing_of_the_log_is_run(tmp_path):
    """The command is what the user typed; a hostile name stays data."""
    path = tmp_path / "x; touch hacked #.jsonl"
    append(path, enumerate(VALUES, start=1))
    run = watch(path, "--on-critical", 'printf %s "$KL_GUARD_LOG" > seen', cwd=tmp_path)
    run.communicate(timeout=30)
    assert run.returncode == 1
    assert not (tmp_path / "hacked").exists()
    assert (tmp_path / "seen").read_text() == str(path)


def test_watch_of_a_run_that_was_resumed(tmp_path):
    """Steps go back: what was seen after them is dropped, as the run did."""
    path = tmp_path / "run.jsonl"
    append(path, [*enumerate(VALUES[:45], start=1), *((step, 0.02) for step in range(41, 60))])
    run = watch(path, "--idle", "0.5")
    out, errors = run.communicate(timeout=30)
    assert run.returncode == 0, out
    assert "is left out" not in errors


def interrupt_when_reading(run, path):
    """Send what Ctrl-C does as soon as the log is open."""
    opened = Path(f"/proc/{run.pid}/fd")
    while run.poll() is None and not any(os.path.realpath(fd) == str(path) for fd in opened.iterdir()):
        time.sleep(0.05)
    time.sleep(0.2)
    run.send_signal(signal.SIGINT)


def test_ctrl_c_is_quiet(tmp_path):
    """Status 130, no traceback."""
    path = tmp_path / "run.jsonl"
    append(path, enumerate(VALUES[:20], start=1))
    run = watch(path)
    threading.Thread(target=interrupt_when_reading, args=(run, path)).start()
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "Traceback" not in errors


def test_help_names_every_command_and_flag():
    """Found by those who look."""
    assert all(name in kl_guard("--help")[1] for name in ("replay", "watch"))
    text = kl_guard("replay", "--help")[1]
    assert "--abs-floor" in text
    assert "--no-robust" in text


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([None, float("nan")], "  "),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 0.001, 1.0], "▁▁█"),
        ([-1.0, 0.0, 1.0], "▁▅█"),
        ([1.0, float("inf"), 2.0], "▁██"),
    ],
)
def test_the_curve(values, curve):
    """Zeros at the start, negative k1, gaps, inf."""
    assert sparkline(values, 10) == curve


def test_a_peak_is_not_averaged_away():
    """Each column shows its largest."""
    values = [0.01] * 1000
    values[501] = 5.0
    assert BLOCKS[-1] in sparkline(values, 50)
