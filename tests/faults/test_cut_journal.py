"""A journal as a crash leaves it: cut anywhere, filled with NUL bytes, a line written twice."""

import logging

import pytest

from kl_guard import GuardConfig, KLGuard
from kl_guard.journal import read_journal
from kl_guard.lines import LinesFile, encode
from kl_guard.memory import recall

CONFIG = GuardConfig(action="rollback", grace=0)


def journal_of(folder):
    return folder / "kl_guard" / "journal.jsonl"


def a_run(folder, *, until):
    """A run whose journal ends with an observation, a finding and decision, or a rollback."""
    guard = KLGuard(CONFIG, output_dir=folder, announce=False)
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "checkpoint-20" / "weights").write_text("w")
    for step in range(1, 80):
        if guard.observe(step, 0.02 * 1.6 ** max(0, step - 40), reward=1.0):
            break
        if step == 20:
            guard.checkpoint_saved(20, folder / "checkpoint-20")
        if step == 30 and until == "observation":
            break
    if until == "rollback":
        guard.rolled_back(20)
    guard.close()
    return guard


UNTIL = pytest.mark.parametrize("until", ["observation", "decision", "rollback"])
FILLED = pytest.mark.parametrize("filled", [b"", b"\x00" * 40], ids=["cut", "NUL"])


def whole_lines(rest):
    """How many lines of what is left are whole records, and whether there is something behind them."""
    *lines, torn = rest.split(b"\n")
    return len(lines) + _is_whole(torn), bool(torn) and not _is_whole(torn)


@UNTIL
@FILLED
def test_cut_at_every_byte_of_the_last_two_lines(tmp_path, until, filled):
    """What is read is the whole lines, with one note at most, and so it is once another line was written."""
    a_run(tmp_path / "run", until=until)
    whole = journal_of(tmp_path / "run").read_bytes()
    *first, before, last = whole.splitlines(keepends=True)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(first[-2:]) + before + last)
    all_records, _ = read_journal(path)
    shorter = path.read_bytes()
    for cut in range(len(before) + len(last) + 1):
        rest = shorter[: len(shorter) - cut] + filled
        path.write_bytes(rest)
        count, torn = whole_lines(rest)
        for more in ([], [{"type": "resume", "step": 1}]):
            file = LinesFile(path)
            for record in more:
                file.append(encode(record).encode() + b"\n")
            file.flush()
            file.close()
            records, notes = read_journal(path)
            assert records == [*all_records[:count], *more], cut
            assert len(notes) == torn, cut


def kinds_of_cuts(before, last):
    """Bytes to cut off: each kind of place that there is in a line, in the last line and in the one before it."""
    kinds = {}
    for cut in range(len(before) + len(last) + 1):
        rest = (before + last)[: len(before) + len(last) - cut]
        in_last = len(rest) > len(before)
        part = rest[len(before) :] if in_last else rest
        text = part.count(b'"') % 2 == 1
        kinds.setdefault((in_last, part[-1:] if not text and not part[-1:].isdigit() else text, _is_whole(part)), cut)
    return kinds.values()


@UNTIL
@FILLED
def test_a_guard_resumes_from_each_kind_of_cut(tmp_path, caplog, until, filled):
    """It goes on from the whole lines, with one note at most, and its own lines are whole.

    A guard gets to know a journal as it is read and appended to in the test above, which has every byte.
    """
    a_run(tmp_path / "run", until=until)
    whole = journal_of(tmp_path / "run").read_bytes()
    *_, before, last = whole.splitlines(keepends=True)
    cuts = kinds_of_cuts(before, last)
    assert len(cuts) > 8
    for cut in cuts:
        folder = tmp_path / f"{cut}"
        journal_of(folder).parent.mkdir(parents=True)
        rest = whole[: len(whole) - cut] + filled
        journal_of(folder).write_bytes(rest)
        caplog.clear()
        guard = KLGuard(CONFIG, output_dir=folder)
        if guard.recover():
            guard.rolled_back(20)
        else:
            guard.resumed(25)
        guard.observe(26, 0.02)
        guard.close()
        assert not guard.blind
        notes = [r for r in caplog.records if "torn or not a record" in r.getMessage()]
        assert len(notes) == whole_lines(rest)[1], cut
        records, _ = read_journal(journal_of(folder))
        memory = recall(records)
        assert memory.run_id == guard.run_id
        assert memory.history[-1].step == 26
        assert list(memory.history.steps)[:20] == list(range(1, 21))
        assert memory.attempt == guard.attempt == memory.rollbacks
        assert memory.unreadable == 0
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR and "fault" in r.getMessage()]


def _is_whole(line):
    """Only the end of the line is missing: nothing is lost."""
    return line.endswith(b"}") and line.count(b"{") == line.count(b"}")


@UNTIL
def test_a_last_line_that_is_there_twice(tmp_path, until):
    """It counts once: budget and findings are what they were."""
    guard = a_run(tmp_path, until=until)
    path = journal_of(tmp_path)
    once = recall(read_journal(path)[0])
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[-1])
    twice = recall(read_journal(path)[0])
    assert (twice.attempt, twice.rollbacks, twice.pending) == (guard.attempt, once.rollbacks, once.pending)
    assert twice.findings == once.findings
    assert list(twice.history) == list(once.history)


def test_nothing_but_nul_bytes(tmp_path, caplog):
    """A file that a crash has left with its length only: said, and the run begins a memory of its own."""
    journal_of(tmp_path).parent.mkdir()
    journal_of(tmp_path).write_bytes(b"\x00" * 5000)
    guard = KLGuard(output_dir=tmp_path)
    guard.resumed(10)
    guard.observe(11, 0.02)
    guard.close()
    assert caplog.text.count("torn or not a record") == 1
    assert not guard.blind
    assert list(recall(read_journal(journal_of(tmp_path))[0]).history.steps) == [11]
