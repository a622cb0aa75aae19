"""A log that is still being written."""

from __future__ import annotations

import gzip
import json

import pytest

from kl_guard.logs import Follower


def line(step):
    return json.dumps({"step": step, "kl": 0.01 * step}) + "\n"


def steps(rows):
    return [row["step"] for row in rows]


def test_only_whole_lines_are_read(tmp_path):
    """What is half written waits for its end."""
    path = tmp_path / "log"
    follower = Follower(path)
    assert follower.poll() == []
    path.write_text(line(1) + line(2)[:7])
    assert steps(follower.poll()) == [1]
    assert follower.poll() == []
    with path.open("a") as file:
        file.write(line(2)[7:] + line(3))
    assert steps(follower.poll()) == [2, 3]
    follower.close()


@pytest.mark.parametrize("way", ["truncated", "rewritten", "rotated"])
def test_a_file_that_begins_anew(tmp_path, way):
    """Cut short, written anew with as much, or replaced: what was left of the old one, then the new one."""
    path = tmp_path / "log"
    path.write_text(line(1) + line(2))
    follower = Follower(path)
    assert steps(follower.poll()) == [1, 2]
    if way == "truncated":
        path.write_text(line(7))
    elif way == "rewritten":
        path.write_text(line(7) + line(8) + line(9))
    else:
        with path.open("a") as file:
            file.write(line(3))
        path.rename(tmp_path / "log.1")
        path.write_text(line(7))
    expected = {"truncated": [7], "rewritten": [7, 8, 9], "rotated": [3, 7]}
    assert steps(follower.poll()) == expected[way]
    assert follower.restarts == 1
    follower.close()


def test_lines_that_cannot_be_read_are_noted(tmp_path):
    """With their number; the others count. A line of many megabytes is passed over."""
    path = tmp_path / "log"
    path.write_text(line(1) + "oops\n" + "x" * 5_000_000 + "\n" + line(4))
    follower = Follower(path)
    assert steps(follower.poll()) == [1, 4]
    assert any("line 2" in note for note in follower.notes.texts)
    assert any("longer than 4 MB" in note for note in follower.notes.texts)
    follower.close()


def test_console_and_csv_too(tmp_path):
    """The format is told by the first line, a header is remembered."""
    csv, console = tmp_path / "csv", tmp_path / "console"
    csv.write_text("step,kl\n1,0.1\n")
    console.write_text("starting\n{'kl': 0.1}\n")
    followers = [Follower(csv), Follower(console)]
    assert [len(f.poll()) for f in followers] == [1, 1]
    with csv.open("a") as file:
        file.write("2,0.2\n")
    assert followers[0].poll() == [{"step": "2", "kl": "0.2"}]
    for follower in followers:
        follower.close()


def test_a_compressed_file_cannot_be_followed(tmp_path):
    """It says what can be done instead."""
    (tmp_path / "log").write_bytes(gzip.compress(line(1).encode()))
    with pytest.raises(ValueError, match="cannot be followed; replay reads it"):
        Follower(tmp_path / "log")
