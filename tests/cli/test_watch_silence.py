"""`kl-guard watch` where there is nothing to be seen: it says so once, instead of seeming to guard a run."""

import json
import os
from pathlib import Path

import pytest

from kl_guard.cli import main, watching

ROWS = "".join(json.dumps({"step": step, "loss": 0.1, "kl": 0.02}) + "\n" for step in range(1, 31))
NAMELESS = ROWS.replace("kl", "tether")
WATCH = ["watch", "log", "--interval", "0.01", "--idle", "0.05"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("content", "arguments", "hint"),
    [
        (NAMELESS, [], "log: no KL in 30 lines, 30 of them with metrics; there are: step, loss, tether"),
        (NAMELESS, ["--key", "x"], "log: no 'x' in 30 lines, 30 of them with metrics; there are: step, loss, tether"),
        ("Loading\n" * 5, [], "log: no KL in 5 lines, 0 of them with metrics"),
        (json.dumps({"log_history": [{"step": 1, "kl": 0.1}]}), [], "log: no KL in 0 lines, no line with an end"),
        ("", [], "log: no KL in 0 lines, no line with an end"),
        (None, [], "log: the file is not there"),
    ],
)
def test_a_log_without_kl(capsys, content, arguments, hint):
    """One line, with what there is instead."""
    if content is not None:
        Path("log").write_text(content)
    assert main([*WATCH, *arguments]) == 0
    assert [line.startswith(f"kl-guard: {hint}") for line in capsys.readouterr().err.splitlines()] == [True]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_an_encoding_that_is_not_read(capsys, encoding):
    """Not a word would be understood."""
    Path("log").write_text(ROWS, encoding=encoding)
    assert main(WATCH) == 0
    assert "log: no KL in 30 lines, 0 of them with metrics" in capsys.readouterr().err


def test_it_is_said_while_the_run_goes_on(capsys, monkeypatch):
    """After some time, and not again."""
    Path("log").write_text("Loading\n")
    monkeypatch.setattr(watching, "SILENCE", 0.1)
    assert main([*WATCH[:-1], "0.5"]) == 0
    assert capsys.readouterr().err.count("no KL in 1 lines") == 1


def test_a_log_with_kl(capsys, monkeypatch):
    """Only which one is read."""
    Path("log").write_text(ROWS)
    monkeypatch.setattr(watching, "SILENCE", 0.0)
    assert main(WATCH) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kl-guard: KL is read from 'kl' (k3)")


def test_what_is_no_file(capsys):
    """A pipe would hold the command for ever, a device has no end."""
    os.mkfifo("log")
    for name in ("log", "/dev/zero"):
        assert main(["watch", name, "--idle", "0"]) == 2
        assert (
            capsys.readouterr().err == f"kl-guard: error: {name}: watch takes a file, and this is a pipe or a device\n"
        )
