"""Logs that are partly damaged, out of order, or of several runs in one file: never a verdict that is silent of it."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kl_guard import GuardConfig, KLGuard
from kl_guard.cli import main
from kl_guard.logs import Follower, read_rows
from streams import blow_up

VALUES = blow_up(start=60, length=100)
ROWS = [{"step": step, "loss": 0.1, "kl": kl} for step, kl in enumerate(VALUES, start=1)]
CSV = ["step,loss,kl", *(f"{row['step']},0.1,{row['kl']!r}" for row in ROWS)]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def replayed(capsys, *arguments):
    """Replay the log; return status, what was told, and errors."""
    status = main(["replay", "log", "--json", *arguments])
    out, errors = capsys.readouterr()
    return status, json.loads(out) if out else None, errors


def alarm(capsys):
    """The step of the alarm in the sound log."""
    Path("log").write_text("\n".join(CSV) + "\n")
    told = replayed(capsys)[1]
    assert told["action"] == "halt"
    assert not told["notes"]
    return told["fired_at"]


def watched(lines, tmp_path):
    """All rows and notes of a file that grows line by line."""
    path = tmp_path / "growing"
    rows = []
    with path.open("w") as file, Follower(path) as follower:
        for line in lines:
            file.write(line + "\n")
            file.flush()
            rows += follower.poll()
        return rows, follower.notes.texts


QUOTES = {
    "torn in a cell": (51, '51,0.1,"0.0'),
    "a quote in a cell": (20, '19,6" gun,0.02'),
    "torn in the first cell": (30, '"30'),
    "in the last line": (100, '100,0.1,"0'),
}


@pytest.mark.parametrize(("number", "line"), QUOTES.values(), ids=QUOTES.keys())
def test_a_quote_that_is_never_closed_costs_its_line(capsys, tmp_path, number, line):
    """And a note with its number; for what follows a file, too."""
    fired = alarm(capsys)
    lines = [*CSV]
    lines[number] = line
    Path("log").write_text("\n".join(lines) + "\n")
    status, told, _ = replayed(capsys)
    assert (status, told["fired_at"], told["observations"]) == (0, fired, 99)
    assert told["notes"] == [f"log: line {number + 1} belongs to a quoted cell without end; it is left out"]
    rows, notes = watched(lines, tmp_path)
    if number < 100:
        assert [int(row["step"]) for row in rows] == [n for n in range(1, 101) if n != number]
        assert len(notes) == 1


def test_what_follows_an_open_quote_is_read_again(tmp_path):
    """Lines that are rows, lines that are none, and one that opens the next cell: each is told by its own number."""
    lines = [
        "step,kl,note",
        '1,0.1,"open',
        "no row",
        "",
        '2,0.2,"fine"',
        '3,0.3,"open too',
        "4,0.4,x",
        "5,0.5,y",
        "6,0.6,",
    ]
    Path("log").write_text("\n".join(lines) + "\n")
    assert [row["step"] for row in read_rows("log")] == ["2", "4", "5", "6"]
    rows, notes = watched(lines, tmp_path)
    assert [row["step"] for row in rows] == ["2", "4", "5", "6"]
    (note,) = notes
    assert note.startswith(f"{tmp_path / 'growing'}: line 2 belongs to a quoted cell without end")
    assert note.endswith("(and 2 more like it)")


def test_a_cell_of_several_lines_is_one(tmp_path):
    """With commas and numbers in it."""
    lines = ["step,kl,note", '1,0.1,"a, b, c', "", 'said 12"', '2,0.2,"x ""y"" z"', "3,0.3,"]
    Path("log").write_text("\n".join(lines) + "\n")
    assert [row.get("note") for row in read_rows("log")] == ["a, b, c  said 12", 'x "y" z', None]
    assert not watched(lines, tmp_path)[1]


@pytest.mark.parametrize(
    ("header", "make"),
    [
        ("step,loss,kl", lambda row: f"{row['step']},0.1,{row['kl']!r}"),
        ("step,kl,loss", lambda row: f"{row['step']},{row['kl']!r},0.1"),
        ("step,loss,reward,kl", lambda row: f"{row['step']},0.1,1.0,{row['kl']!r}"),
    ],
)
def test_a_header_in_mid_file(capsys, tmp_path, header, make):
    """A run that was resumed into the same file, with the same columns, in another order, or with one more."""
    fired = alarm(capsys)
    lines = [*CSV[:51], header, *map(make, ROWS[50:])]
    Path("log").write_text("\n".join(lines) + "\n")
    status, told, _ = replayed(capsys)
    assert (status, told["fired_at"], told["notes"]) == (0, fired, [])
    rows, notes = watched(lines, tmp_path)
    assert [float(row["kl"]) for row in rows] == VALUES
    assert not notes


@pytest.mark.parametrize("cell", ["oops", "2.1e-", "[1, 2]"])
@pytest.mark.parametrize("number", [1, 40, 100])
def test_a_value_that_is_none_costs_its_row(capsys, number, cell):
    """Whether in the middle or where a kill tore the last line."""
    fired = alarm(capsys)
    lines = [*CSV]
    lines[number] = f'{number},0.1,"{cell}"'
    Path("log").write_text("\n".join(lines))
    status, told, _ = replayed(capsys)
    assert (status, told["fired_at"], told["observations"]) == (0, fired, 99)
    (note,) = told["notes"]
    assert note.startswith(f"log: line {number + 1}, row {number}: kl must be a number")
    assert note.endswith("it is left out")


def test_mostly_values_that_are_none(capsys):
    """Is no log."""
    Path("log").write_text("\n".join([*CSV[:20], *("1,0.1,oops" for _ in range(19))]))
    status, told, errors = replayed(capsys)
    assert (status, told) == (2, None)
    assert errors.startswith("kl-guard: error: log: line 21, row 20: kl must be a number")
    assert errors.endswith("(and 18 more like it)\n")


def test_a_damaged_first_line(capsys):
    """The rest tells what it is."""
    fired = alarm(capsys)
    Path("log").write_text('{"step": 0, "k\n' + "".join(json.dumps(row) + "\n" for row in ROWS))
    status, told, _ = replayed(capsys)
    assert (status, told["fired_at"], len(told["notes"])) == (0, fired, 1)


def test_a_long_table_with_a_row_that_is_none(capsys):
    """A step that is no number."""
    lines = ["key,value,step", *(f"kl,{row['kl']!r},{row['step']}" for row in ROWS)]
    lines.insert(30, "kl,0.02,x")
    Path("log").write_text("\n".join(lines) + "\n")
    status, told, _ = replayed(capsys)
    assert (status, told["observations"]) == (0, 100)
    assert told["notes"] == ["log: line 31, step must be a whole number, got 'x'; it is left out"]


def shuffled():
    rows = [*ROWS]
    random.Random(0).shuffle(rows)
    return rows


ORDERS = {
    "half forward, half back": [*ROWS[::2], *ROWS[::-2]],
    "shuffled": shuffled(),
    "two writers": [row for pair in zip(ROWS[1:], ROWS[:-1], strict=True) for row in pair],
    "sorted as text": sorted(ROWS, key=lambda row: str(row["step"])),
    "four, newest first": ROWS[3::-1],
}


@pytest.mark.parametrize("rows", ORDERS.values(), ids=ORDERS.keys())
def test_rows_out_of_order(capsys, rows):
    """Each would be a resume: what a verdict rested on would be a part."""
    Path("log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, told, errors = replayed(capsys)
    assert (status, told) == (2, None)
    assert "steps go back in " in errors
    assert "sort them, the first step first" in errors


@pytest.mark.parametrize(
    "starts",
    [[0, 40, 80], [0, 0, 0, 0], [0, 10, 20, 30, 40, 50, 60, 70, 80]],
    ids=["resumed", "begun anew", "resumed often"],
)
def test_real_resumes_are_read(capsys, starts):
    """A run that was resumed, or begun anew, into the same file, and each time went on for a while."""
    length = 100 if len(set(starts)) == 1 else 20
    rows = [row for start in starts for row in ROWS[start : start + length]]
    Path("log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, told, _ = replayed(capsys)
    assert (status, told["last_step"]) == (0, 100)


def test_watch_says_that_steps_go_back(capsys):
    """Once."""
    lines = [json.dumps(row) + "\n" for row in [*ROWS[:30], *ROWS[20:40], *ROWS[35:50]]]
    Path("log").write_text("".join(lines))
    assert main(["watch", "log", "--interval", "0.01", "--idle", "0.05"]) == 0
    assert capsys.readouterr().err.count("steps go back from 30 to 21, read as a resume") == 1


def test_a_report_of_standard_input_is_not_written_over_it():
    """A log that is redirected is a file that is read."""
    Path("log").write_text("\n".join(CSV) + "\n")
    before = Path("log").read_text()
    command = [sys.executable, "-m", "kl_guard", "replay", "-", "--report", "log"]
    with Path("log").open() as log:
        done = subprocess.run(command, stdin=log, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert Path("log").read_text() == before


def test_a_report_takes_the_place_of_reports_only(capsys):
    """Another file of the user's stays."""
    Path("log").write_text("\n".join(CSV) + "\n")
    Path("notes.txt").write_text("mine")
    assert replayed(capsys, "--report", "notes.txt")[0] == 2
    assert Path("notes.txt").read_text() == "mine"
    for _ in range(2):
        assert replayed(capsys, "--report", "page.html")[0] == 0


def test_a_run_that_had_knobs_of_its_own(capsys):
    """Its journal says so, and a replay without them."""
    guard = KLGuard(GuardConfig(abs_floor=30.0), output_dir="run", announce=False)
    for row in ROWS:
        guard.observe(row["step"], row["kl"])
    guard.close()
    assert main(["replay", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [note.endswith("had abs_floor=30.0: give that as well to judge as it did") for note in told["notes"]] == [
        True
    ]


@pytest.mark.parametrize("journal", [b"", b"\x80garbage\n" * 5, b'{"type":"run","run_id":"a"}\n'])
def test_a_run_without_observations_has_no_report(capsys, journal):
    """And the page that is there stays."""
    folder = Path("run/kl_guard")
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_bytes(journal)
    (folder / "report.html").write_text("<!doctype html>old")
    (folder / "tokens.jsonl").write_bytes(journal)
    for command in ("report", "tokens"):
        assert main([command, "run"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (folder / "report.html").read_text() == "<!doctype html>old"


def test_a_journal_that_is_mostly_damage(capsys):
    """Is refused, with its first damaged line."""
    guard = KLGuard(output_dir="run", announce=False)
    for row in ROWS[:50]:
        guard.observe(row["step"], row["kl"])
    guard.close()
    path = Path("run/kl_guard/journal.jsonl")
    path.write_bytes(b"".join(line + b"\ngarbage\n" for line in path.read_bytes().splitlines()))
    assert main(["replay", "run"]) == 2
    assert "line 2 is no record of a journal (and " in capsys.readouterr().err


def test_utf_16_is_named(capsys):
    """As PowerShell writes it."""
    Path("log").write_text("\n".join(CSV) + "\n", encoding="utf-16")
    assert replayed(capsys)[2] == "kl-guard: error: log: UTF-16, which is not read; save it as UTF-8\n"


def test_notes_of_several_logs_say_which(capsys):
    """Also where they are the same."""
    for name in "ab":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:30], *ROWS[20:40]]))
    assert main(["replay", "a", "b"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [note.partition(": ")[2][:2] for note in notes] == ["a:", "b:"]
