"""Replay: numbers, rows and files give the same answer; what cannot be read is said with its place."""

import json

import numpy as np
import pytest

from kl_guard import GuardConfig, KLGuard, replay
from streams import blow_up

VALUES = blow_up()
EXPECTED = replay(VALUES)


def rows():
    """The same run as rows of a log."""
    return [{"step": step, "kl": kl, "loss": 0.1, "epoch": 0.01} for step, kl in enumerate(VALUES, start=1)]


def write_csv(path):
    lines = ["step,kl,note", *(f"{row['step']},{row['kl']!r}," for row in rows())]
    path.write_text("\n".join(lines) + "\n")


def write_jsonl(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))


def write_trainer_state(path):
    history = [*rows(), {"eval_loss": 0.1, "eval_kl": 9.0, "step": 80}, {"train_loss": 0.1, "step": 80}]
    path.write_text(json.dumps({"log_history": history, "global_step": 80}, indent=2))


def write_journal(path):
    guard = KLGuard(GuardConfig(action="warn"), output_dir=path.parent, announce=False)
    for row in rows():
        guard.observe(row["step"], row["kl"])
    guard.close()
    (path.parent / "kl_guard" / "journal.jsonl").rename(path)


WRITERS = {"csv": write_csv, "jsonl": write_jsonl, "trainer_state": write_trainer_state, "journal": write_journal}


def answer(result):
    return result.fired_at, result.onset_step, result.departure_step, result.decision.action, result.observations


def test_what_a_replay_answers():
    """When it would have stopped, and from where on the run was lost."""
    assert EXPECTED.decision.action == "halt"
    assert EXPECTED.decision.reason in EXPECTED.findings
    assert EXPECTED.departure_step <= EXPECTED.onset_step <= EXPECTED.fired_at
    healthy = replay([0.02] * 100)
    assert answer(healthy) == (None, None, None, "continue", 100)


@pytest.mark.parametrize(
    "source",
    [tuple(VALUES), np.array(VALUES), iter(VALUES), rows(), (r for r in rows()), [{"kl_mean": v} for v in VALUES]],
    ids=["tuple", "array", "iterator", "rows", "generator", "rows without steps"],
)
def test_numbers_and_rows_of_any_kind(source):
    """The same series, the same answer."""
    assert answer(replay(source)) == answer(EXPECTED)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", ["run.log", "no-extension"])
def test_files_are_told_by_their_content(tmp_path, kind, name):
    """CSV, JSON lines, trainer_state.json, the guard's own journal; as text or as a path."""
    path = tmp_path / name
    WRITERS[kind](path)
    assert answer(replay(path)) == answer(EXPECTED)
    assert answer(replay(str(path))) == answer(EXPECTED)


def test_knobs_by_name_and_as_a_config():
    """Thresholds can be tried on one's own past runs."""
    assert replay(VALUES, abs_floor=0.1).fired_at < EXPECTED.fired_at
    assert answer(replay(VALUES, GuardConfig(abs_floor=0.1))) == answer(replay(VALUES, abs_floor=0.1))
    with pytest.raises(TypeError, match="did you mean 'ratio'"):
        replay(VALUES, ration=2)


def test_nothing_is_logged_or_written(tmp_path, monkeypatch, caplog):
    """A replay answers; it does not announce."""
    monkeypatch.chdir(tmp_path)
    replay(VALUES)
    assert not caplog.records
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([0.1, "high"], "row 2: kl_mean must be a number"),
        ([{"step": 1, "kl": [1, 2]}], "row 1: kl must be a number"),
        ([{"step": -1, "kl": 0.1}], "row 1: step must be a whole number of at least 0"),
        ([{"step": 5, "kl": 0.1, "window": -2}], "row 1: window must be a whole number of at least 1"),
        ([object()], "row 1: kl_mean must be a number"),
    ],
)
def test_rows_that_cannot_be_read(source, text):
    """The message has the row."""
    with pytest.raises(ValueError, match=text):
        replay(source)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "empty, so neither JSON nor a CSV file"),
        ("step,loss\n1,0.5\n", r"neither JSON nor a CSV file with a column kl or kl_mean; columns: \['loss', 'step'\]"),
        ('{"step": 1, "loss": 0.5}\n', "no KL in this log; it has: loss, step"),
        ('{"log_history": []}', "no KL in this log; it has: nothing"),
        ('{"step": 1, "kl": 0.5}\n{"step": 2, "kl"\n', "line 2 is not JSON"),
        ('{"step": 1, "kl": 0.5}\n[3]\n', "line 2 is not a row"),
        ("step,kl\n1,0.5\n2,oops\n", "row 2: kl must be a number"),
        ("\x00\x01\x02", "neither JSON nor a CSV file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, text):
    """The message says what is wrong, and where."""
    path = tmp_path / "log"
    path.write_text(content)
    with pytest.raises(ValueError, match=text):
        replay(path)


def test_a_file_that_is_not_there(tmp_path):
    """The system's own error, with the path."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        replay(tmp_path / "nowhere.csv")


def test_an_empty_run():
    """No rows, no decision."""
    assert answer(replay([])) == (None, None, None, "continue", 0)


def test_a_log_with_a_resume_in_it():
    """Steps that go back: what was dropped in the run is dropped here, and it is noted."""
    rows = [(step, 0.02) for step in range(1, 101)] + [(step, kl) for step, kl in enumerate(VALUES, 1) if step > 35]
    result = replay([{"step": step, "kl": kl} for step, kl in rows])
    assert (result.fired_at, result.onset_step, result.departure_step) == answer(EXPECTED)[:3]
    assert result.notes == ("row 101: steps go back from 100 to 36, read as a resume",)


@pytest.mark.parametrize("content", ["step,kl\n1," + "9" * 200_000 + "\n2,0.1\n", '{"a": ' + "[" * 100_000])
def test_files_that_break_readers(tmp_path, content):
    """A field without end, nesting without end: an error of the right kind."""
    path = tmp_path / "log"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"log|row"):
        replay(path)
    path.write_text("step,kl\n1,0.5\n")
    assert replay(path).observations == 1


def test_a_torn_last_line_is_left_out(tmp_path, caplog):
    """A log that is still being written."""
    path = tmp_path / "log"
    path.write_text('{"step": 1, "kl": 0.5}\n{"step": 2, "kl": 0.5}\n{"step": 3, "k')
    assert replay(path).observations == 2
    assert "line 3 is torn" in caplog.text


def test_a_log_with_the_newest_row_first(tmp_path):
    """Read as it stands, each row would be a resume, and nothing would ever be found."""
    rows = [{"step": step, "kl": kl} for step, kl in enumerate(VALUES, start=1)]
    assert replay(rows).decision
    with pytest.raises(ValueError, match=r"^steps go back in 79 of 80 rows: sort them, the first step first"):
        replay(rows[::-1])
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    with pytest.raises(ValueError, match=f"^{path}: steps go back in 79 of 80 rows"):
        replay(path)


def test_many_resumes_are_one_note():
    """The first, and how many more."""
    rows = [{"step": step, "kl": 0.02} for start in range(0, 60, 5) for step in range(start, start + 10)]
    (note,) = replay(rows).notes
    assert note == "row 11: steps go back from 9 to 5, read as a resume (and 10 more like it)"


def test_a_file_that_lay_on_a_disk_that_lost_power(tmp_path):
    """Zero bytes in the middle: the line is left out."""
    lines = [json.dumps({"step": step, "kl": kl}) for step, kl in enumerate(VALUES, start=1)]
    lines[5] = "\0" * 100
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines) + "\n")
    result = replay(path)
    assert result.observations == len(VALUES) - 1
    assert result.decision
    assert ["line 6" in note for note in result.notes] == [True]
