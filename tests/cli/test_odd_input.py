"""What a command line meets: files that are no logs, names that are commands, streams that are closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kl_guard.cli import main
from kl_guard.cli.answer import Question, answers

IO = Path("/proc/self/io")
VALUES = [0.02] * 40 + [0.02 * 1.6**k for k in range(20)]
LINES = "".join(json.dumps({"step": step, "kl": kl}) + "\n" for step, kl in enumerate(VALUES, start=1))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.jsonl").write_text(LINES)
    (tmp_path / "folder").mkdir()
    return tmp_path


def shell(command):
    """Run the command line with `kl-guard` in a shell."""
    text = command.replace("kl-guard", f"{sys.executable} -m kl_guard")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "odd: No such file or directory"),
        (b"", "neither JSON nor a CSV file"),
        (bytes(range(256)), "binary"),
        (b"x" * 5_000_000, "neither JSON nor a CSV file"),
        (b"[" * 100_000, "neither JSON nor a CSV file"),
        (b'{"step": 1, "\\u001b[31mloss": 0.1}\n', "no KL in this log; it has: \\x1b[31mloss, step"),
        (b'{"step": "\\u001b[2J[/]", "kl": 0.1}\n', "step must be a number"),
        (b'{"step": 1, "kl": 1' + b"0" * 400 + b"}\n", "kl must be a number"),
    ],
)
def test_what_is_no_log(here, capsys, content, message):
    """One line, status 2, no escape sequence of the file."""
    if content is not None:
        (here / "odd").write_bytes(content)
    assert main(["replay", "odd"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", ""], "the path is empty"),
        (["replay", "folder"], "a folder without trainer_state.json"),
        (["replay", "run.jsonl", "--report", "folder"], "folder: Is a directory"),
        (["replay", "run.jsonl", "--report", ""], "the path is empty"),
        (["replay", "run.jsonl", "run.jsonl", "--report", "x.html"], "--report takes one log and no --sweep"),
        (["replay", "run.jsonl", "--cost-per-hour", "nan"], "must be a number above 0 and at most 1e9, got 'nan'"),
        (["replay", "run.jsonl", "--sweep", "ratio="], "--sweep takes KNOB=VALUE"),
        (["replay", "run.jsonl", "--sweep", "ratio=4,,5"], "ratio must be a number, got ''"),
        (["replay", "run.jsonl", "--sweep", "ratio=4,nan"], "ratio must be a finite number above 1, got nan"),
        (["replay", "run.jsonl", "--sweep", "warmup=1e3"], "warmup must be a whole number, got '1e3'"),
        (["replay", "run.jsonl", "--sweep", "ratio=4", "ratio=5"], "--sweep takes each knob once"),
        (["replay", "no\x1b[31mthere"], "no\\x1b[31mthere: No such file"),
        (["replay", "run.jsonl", "--\x1b[31m\nx"], "unrecognized arguments: --\\x1b[31m\\nx"),
        (["watch", "folder"], "folder: watch takes a file, and this is a folder"),
        (["watch", "run.jsonl", "--interval", "inf"], "--interval must be a number above 0, got inf"),
        (["watch", "run.jsonl", "--idle", "nan"], "--idle must be a number of at least 0, got nan"),
        (["report", "\x1b[31m"], "\\x1b[31m has no kl_guard/journal.jsonl"),
        (["tokens", "folder"], "folder has no kl_guard/journal.jsonl"),
        (["tokens", ""], "the path is empty"),
    ],
)
def test_usage_errors(capsys, arguments, message):
    """One line, status 2; nothing of what was typed reaches the terminal as a command."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert "\x1b" not in err


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything may be read")
@pytest.mark.parametrize("verb", ["replay", "watch"])
def test_a_file_that_may_not_be_read(here, capsys, verb):
    """Is said, also by a watch, which would wait for ever."""
    (here / "run.jsonl").chmod(0)
    assert main([verb, "run.jsonl"]) == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["[red]x[-red].jsonl", "[bold]", "[/x]", "{x}", "e\x1b[2J.jsonl", "two\nlines", "s\udcff", "é中"]
)
def test_names_are_text(here, capsys, monkeypatch, name):
    """In the text, the table, JSON and the report: neither markup nor commands, one name on one line."""
    monkeypatch.setenv("COLUMNS", "120")
    (here / name).parent.mkdir(exist_ok=True)
    (here / name).write_text(LINES)
    assert main(["replay", name, "--report", "out.html"]) == 0
    text = capsys.readouterr().out
    assert main(["replay", name, "run.jsonl"]) == 0
    table = capsys.readouterr().out
    assert main(["replay", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["log"] == name
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)
    assert text.startswith(f"{shown}: 60 observations")
    assert Path(shown).name in table
    assert "\x1b" not in text + table
    assert (here / "out.html").stat().st_size > 1000


def test_values_that_json_does_not_have(here, capsys):
    """An infinite KL in the evidence is a string, as everywhere."""
    values = [0.02] * 39 + [float("inf")] * 4
    lines = (json.dumps({"step": step, "kl": kl}) + "\n" for step, kl in enumerate(values, start=1))
    (here / "infinite.jsonl").write_text("".join(lines))
    assert main(["replay", "infinite.jsonl", "--json"]) == 0
    text = capsys.readouterr().out
    json.loads(text, parse_constant=pytest.fail)
    assert '"inf"' in text


def test_money_and_hours_have_a_limit(capsys):
    """What they come to is a number."""
    assert main(["replay", "run.jsonl", "--hours", "1e308"]) == 2
    assert "must be a number above 0 and at most 1e9, got '1e308'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("kl-guard --help | true; exit ${PIPESTATUS[0]}", 0),
        ("kl-guard replay run.jsonl | true; exit ${PIPESTATUS[0]}", 0),
        ("kl-guard replay run.jsonl >&-", 0),
        ("kl-guard replay nowhere 2>&-", 2),
        ("kl-guard replay run.jsonl > /dev/full", 2),
        ("kl-guard --help > /dev/full", 2),
        ("kl-guard replay <(cat run.jsonl)", 2),
        ("env -u TERM -u COLUMNS LC_ALL=C kl-guard replay run.jsonl é*", 0),
        ("PYTHONIOENCODING=ascii kl-guard replay run.jsonl é*", 0),
    ],
)
def test_streams(here, command, status):
    """Closed, full, gone, or of ASCII: a status, at most one line, no traceback."""
    (here / "é.jsonl").write_text(LINES)
    run = shell(command)
    assert run.returncode == status, run.stderr
    assert run.stderr.count("\n") <= 1
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr


def test_watch_says_what_it_leaves_out(here, capsys):
    """Once per kind of thing."""
    (here / "run.jsonl").write_text('{"step": 1, "kl": 0.1}\n{no\n{no\n')
    assert main(["watch", "run.jsonl", "--idle", "0", "--interval", "0.01"]) == 0
    assert capsys.readouterr().err.count("line 2 is not JSON") == 1


def test_notes_stand_beside_a_table(here, capsys):
    """They are part of the text of one log, and of JSON; a table has no place for them."""
    (here / "torn.jsonl").write_text(LINES + '{"step": 61, "k')
    assert main(["replay", "torn.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "is torn" in out
    assert err == ""
    assert main(["replay", "torn.jsonl", "run.jsonl"]) == 0
    assert "is torn" in capsys.readouterr().err


def bytes_read():
    return int(next(line for line in IO.read_text().splitlines() if line.startswith("rchar")).split()[1])


@pytest.mark.skipif(not IO.exists(), reason="counts bytes as Linux does")
@pytest.mark.parametrize("kind", ["jsonl", "csv", "trainer_state", "folder"])
@pytest.mark.parametrize("settings", [1, 3])
def test_a_log_is_read_once(here, kind, settings):
    """For verdict, curve and running time together, however many settings are tried."""
    rows = [
        {"step": step, "kl": kl, "_runtime": 60.0 * step, "note": "x" * 60_000} for step, kl in enumerate(VALUES, 1)
    ]
    path = here / {"trainer_state": "trainer_state.json", "folder": "trainer_state.json"}.get(kind, f"big.{kind}")
    if kind == "csv":
        path.write_text("step,kl,_runtime,note\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps({"log_history": [*rows, {"step": 60, "train_runtime": 7200.0}]}))
    questions = [Question({"ratio": 4.0 + k}, {"ratio": 4.0 + k}) for k in range(settings)]
    log = str(here if kind == "folder" else path)
    list(answers(log, None, questions))  # what is imported late is read here
    before = bytes_read()
    told = list(answers(log, None, questions))
    assert bytes_read() - before < 1.3 * path.stat().st_size
    assert len(told) == settings
    hours = 2.0 if kind in {"trainer_state", "folder"} else 1.0
    assert told[0].hours_saved == pytest.approx(hours * (60 - told[0].result.fired_at) / 60)
    assert list(told[0].history.column("kl_mean")) == VALUES
