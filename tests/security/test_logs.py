"""Logs are read from anywhere: hostile ones end in one line, in bounded time and memory, and nothing in them is run."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time

import pytest

from kl_guard import KLGuard
from kl_guard.cli import main
from kl_guard.logs import Follower, trainer_state

DEEP = "[" * 100_000 + "]" * 100_000
LONG = 10**6
BLOW_UP = [json.dumps({"step": step, "kl": 0.02 * 1.5 ** max(0, step - 40)}) for step in range(1, 80)]
SECONDS = 20  # for what takes well below one on a free machine; a quadratic reader takes minutes


def run(capsys, *arguments):
    """Return status, output and errors of the command."""
    try:
        status = main([str(one) for one in arguments])
    except SystemExit as error:
        status = error.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"step": 1, "kl": 0.1}\n' + DEEP + "\n",
        '{"log_history": ' + DEEP + "}",
        '{"log_history": 3}',
        '{"step": 1, "kl": ' + "9" * 5000 + "}",
        '{"step": 1, "kl": [0.1]}',
        '{"step": 1, "kl": ' + "[" * 900 + "]" * 900 + "}",
        '{"step": 1e999, "kl": 1}',
        '{"step": "../../x", "kl": 1}',
        'step,kl\n1,"' + "\n" * 50,
        "kl\0",
        "!!python/object/apply:os.system ['touch mark']",
        "{'kl': __import__('os').system('touch mark')}",
    ],
)
def test_one_line_and_two(tmp_path, capsys, monkeypatch, text):
    """No traceback, no file made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text(text)
    status, _, errors = run(capsys, "replay", "log")
    assert (status, errors.count("\n")) == (2, 1), errors
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


ESC = "\x1b["
HOSTILE = {
    "escapes": ESC * (LONG // 2),
    "an escape without end": ESC + "0;" * (LONG // 2),
    "braces": "{" * LONG,
    "a brace without end": "{" + "a" * LONG,
    "pairs of braces": "{}" * (LONG // 2),
    "quotes": "{" + "'" * LONG + "}",
    "names": "{" + "'a'" * (LONG // 3) + "}",
    "spaces after a name": "{'kl'" + " " * LONG + "}",
    "spaces after colons": "{" + ("'kl':" + " " * 1000) * (LONG // 1000) + "}",
    "long names": "{" + ("'" + "a" * 199) * (LONG // 200) + "}",
    "floats": "{" + "'kl': np.float" * (LONG // 14) + "}",
    "steps": "step " * (LONG // 5) + "{'kl': 0.1}",
    "dashes": "step:1 -" + " - " * (LONG // 3),
    "colons": "step:1 - " + ":" * LONG,
    "verl": "step:1 - " + "a:1 - " * (LONG // 6),
    "digits": "step:" + "1" * LONG,
    "returns": "step:" + "\r" * LONG,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_on_one_line(tmp_path, capsys, name):
    """The patterns that find metrics in a console's text never go back over what they have read again and again."""
    began = time.perf_counter()
    (tmp_path / "log").write_text("started\n" + HOSTILE[name] + "\n")
    run(capsys, "replay", tmp_path / "log")
    assert time.perf_counter() - began < SECONDS


def test_a_quoted_cell_without_end(tmp_path, capsys):
    """A megabyte of empty lines in it: each is looked at once."""
    began = time.perf_counter()
    (tmp_path / "log").write_text('step,kl\n1,0.1\n2,"' + "\n" * (LONG + 2**17))
    status, _, errors = run(capsys, "replay", tmp_path / "log")
    assert (status, "a quoted cell without end" in errors) == (2, True)
    assert time.perf_counter() - began < SECONDS


def test_a_quoted_cell_that_ends_lines_later(tmp_path, capsys):
    """It is one row."""
    (tmp_path / "log").write_text('step,kl,note\n1,0.1,"a\n\nb"\n' + "".join(f"{s},0.1,\n" for s in range(2, 30)))
    status, out, _ = run(capsys, "replay", tmp_path / "log", "--json")
    assert (status, json.loads(out)["observations"]) == (0, 29)


@pytest.mark.parametrize("name", ["run {} - kl", "x{}"])
def test_a_row_of_thirty_thousand_names(tmp_path, capsys, name):
    """And thousands of rows after it."""
    wide = json.dumps({"step": 0, **{name.format(n): 0.1 for n in range(30_000)}, "kl": 0.1})
    began = time.perf_counter()
    rows = "".join(f'{{"step": {n}, "reward": 1}}\n' for n in range(1, 6_000))
    (tmp_path / "log").write_text(f'{{"step": 0}}\n{wide}\n{rows}')
    run(capsys, "replay", tmp_path / "log")
    assert time.perf_counter() - began < 2 * SECONDS


def test_a_small_archive_of_a_large_file(tmp_path, capsys, monkeypatch):
    """A history is read whole, so what it may unpack to has a limit."""
    monkeypatch.setattr(trainer_state, "LARGEST", 2**22)
    path = tmp_path / "trainer_state.json"
    path.write_bytes(gzip.compress(b'{"log_history": [' + b" " * 2**23 + b"]}"))
    assert path.stat().st_size < 2**14
    status, _, errors = run(capsys, "replay", path)
    assert status == 2
    assert errors == f"kl-guard: error: {path}: not JSON that can be read (it is larger than 4 MB)\n"


def test_a_hostile_log_that_is_followed(tmp_path):
    """Nothing is raised, and what is held of a cell without end is let go."""
    path = tmp_path / "log"
    path.write_text('step,kl\n1,0.1\n2,"' + "a\n" * 2**20 + DEEP + "\n")
    with Follower(path) as follower:
        assert follower.poll() == [{"step": "1", "kl": "0.1"}]
        assert any("a quoted cell without end" in note for note in follower.notes.texts)


def mutated(value, rng):
    """A record with something else in one of its places."""
    odd = [None, "x", "", -1, 1e308, float("inf"), 2**70, [], {}, [1], True, "9" * 5000, "../../x", "\0", "\x1b[2J"]
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: mutated(value[key], rng) if rng.random() < 0.5 else rng.choice(odd)}
    return rng.choice(odd)


def test_journals_that_lie(tmp_path, capsys):
    """Records with anything in any place: the commands end in a result or one line; a guard that resumes sees."""
    out = tmp_path / "run"
    guard = KLGuard(output_dir=out, announce=False)
    for step in range(1, 80):
        guard.observe(step, 0.02 * 1.3 ** max(0, step - 50), loss=0.1, grad_norm=1.0)
        if step % 20 == 0:
            guard.checkpoint_saved(step, tmp_path / f"checkpoint-{step}")
    guard.close()
    records = [json.loads(line) for line in (out / "kl_guard" / "journal.jsonl").read_text().splitlines()]
    records.append({"type": "rollback", "to_step": 40, "attempt": 1})
    rng = random.Random(0)
    for number in range(25):
        lies = list(records)
        for _ in range(4):
            at = rng.randrange(len(lies))
            while lies[at].get("type") == "observation" and rng.random() < 0.9:
                at = rng.randrange(len(lies))
            lies[at] = mutated(lies[at], rng)
            if not isinstance(lies[at], dict):
                lies[at] = {"type": "finding", "finding": lies[at]}
        folder = tmp_path / str(number) / "kl_guard"
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").write_text("".join(json.dumps(lie) + "\n" for lie in lies))
        status, _, errors = run(capsys, "report", folder.parent)
        assert status == 0 or (status, errors.count("\n")) == (2, 1)
        guard = KLGuard(output_dir=folder.parent, announce=False)
        guard.resumed(40)
        guard.observe(41, 0.02)
        assert guard.level != -1, "blind"
        guard.close()


def test_the_command_gets_facts_and_nothing_else(tmp_path):
    """A log full of shell, zero bytes and escapes, under a name that is shell too: only numbers and names arrive."""
    path = tmp_path / "$(touch marked)`touch marked`;touch marked;\n'\".jsonl"
    rows = [
        row[:-1] + ', "x\\u0000$(touch marked)": "\\u0000`touch marked`\\u001b[2J;touch marked"}' for row in BLOW_UP
    ]
    path.write_bytes(b"\0$(touch marked)\n".join(row.encode() + b"\n" for row in rows))
    log = str(path)
    command = [sys.executable, "-m", "kl_guard", "watch", log, "--interval", "0.05", "--on-critical", "env -0 > seen"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    seen = dict(pair.split("=", 1) for pair in (tmp_path / "seen").read_text().split("\0") if pair)
    told = {name: value for name, value in seen.items() if name.startswith("KL_GUARD_")}
    assert told["KL_GUARD_LOG"] == log
    assert told["KL_GUARD_SIGNATURE"] == "KL_BLOWUP"
    assert all(told[f"KL_GUARD_{name}"].isdecimal() for name in ("STEP", "ONSET", "DEPARTURE"))
    assert len(told) == 5 + sum(name.startswith("KL_GUARD_") for name in os.environ)
    assert {p.name for p in tmp_path.iterdir()} == {"seen", path.name}


def test_a_command_that_cannot_be_run(tmp_path, capsys):
    """The status still says what was found."""
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(BLOW_UP) + "\n")
    status, _, errors = run(capsys, "watch", path, "--interval", "0.01", "--on-critical", "echo \0")
    assert status == 1
    assert "kl-guard: the command could not be run: embedded null byte" in errors
