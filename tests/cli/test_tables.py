"""Tables on narrow terminals, damaged logs, checkpoints that are not whole: what an answer says of them."""

import json

import pytest

from kl_guard.cli import main
from streams import blow_up


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, values):
    """A log of JSON lines."""
    path.write_text("".join(json.dumps({"step": i, "kl": v}) + "\n" for i, v in enumerate(values, start=1)))


@pytest.mark.parametrize("width", [20, 40, 80])
def test_numbers_and_words_are_never_broken(tmp_path, monkeypatch, capsys, width):
    """However narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", str(width))
    write(tmp_path / "a.jsonl", blow_up(start=140, length=170))
    write(tmp_path / "b.jsonl", [0.02] * 1234)
    assert main(["replay", "a.jsonl", "b.jsonl", "--sweep", "ratio=4,8.125", "--sweep", "abs_floor=0.4375"]) == 0
    words = capsys.readouterr().out.split()
    for word in ("a.jsonl", "b.jsonl", "1234", "170", "8.125", "0.4375", "KL_BLOWUP"):
        assert word in {w.strip(",") for w in words}, word


def test_a_damaged_line_in_the_middle_is_left_out(tmp_path, capsys):
    """A run that was killed in mid-write and resumed into the same file: one note, with how many there are."""
    log = tmp_path / "a.jsonl"
    write(log, blow_up())
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:20], '{"step": 21, "k' + lines[20], '{"st\n', *lines[21:]]))
    assert main(["replay", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["action"] == "halt"
    assert ["line 21" in note for note in told["notes"]] == [True]


def test_what_is_more_damage_than_log_is_refused(tmp_path, capsys):
    """It may be of another kind."""
    log = tmp_path / "a.jsonl"
    write(log, [0.02] * 5)
    log.write_text(log.read_text() + "no json\n" * 5)
    assert main(["replay", str(log)]) == 2
    assert "line 6 is not JSON" in capsys.readouterr().err


def test_checkpoints_from_before_that_are_not_whole(tmp_path, capsys):
    """It is not said that there are none from before."""
    write(tmp_path / "a.jsonl", blow_up(start=40))
    for step in (10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"")
    assert main(["replay", "a.jsonl"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "No checkpoint from before that is whole (checkpoint-20: " in text
    assert "is from before that" not in text


def test_a_log_that_cannot_be_read_costs_no_other(tmp_path, capsys):
    """It is named, and the status says so."""
    write(tmp_path / "a.jsonl", blow_up())
    (tmp_path / "b.jsonl").write_text("nothing\n")
    write(tmp_path / "c.jsonl", [0.02] * 50)
    assert main(["replay", "a.jsonl", "b.jsonl", "nowhere.jsonl", "c.jsonl"]) == 2
    out, errors = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["log", "a.jsonl", "c.jsonl"]
    assert [line.split()[2] for line in errors.splitlines()] == ["b.jsonl:", "nowhere.jsonl:"]
    assert main(["replay", "b.jsonl", "nowhere.jsonl"]) == 2
    assert capsys.readouterr().out == ""


def test_a_wrong_knob_is_said_once(tmp_path, capsys):
    """Not once for each log."""
    for name in "abc":
        write(tmp_path / name, blow_up())
    assert main(["replay", "a", "b", "c", "--sweep", "ratio=4,-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
