"""A journal as a crash leaves it: cut anywhere, filled with NUL bytes, a line written twice."""

import logging
import shutil

import pytest

from kl_guard import GuardConfig, KLGuard
from kl_guard.journal import read_journal
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


@pytest.mark.parametrize("until", ["observation", "decision", "rollback"])
@pytest.mark.parametrize("filled", [b"", b"\x00" * 40], ids=["cut", "NUL"])
def test_cut_at_every_byte_of_the_last_two_lines(tmp_path, caplog, until, filled):
    """A new guard resumes from the whole lines, with one note at most, and its own lines are whole."""
    a_run(tmp_path / "run", until=until)
    whole = journal_of(tmp_path / "run").read_bytes()
    lines = whole.splitlines(keepends=True)
    folder = tmp_path / "again"
    for cut in range(len(lines[-2]) + len(lines[-1]) + 1):
        shutil.rmtree(folder, ignore_errors=True)
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
        torn = rest[rest.rfind(b"\n") + 1 :]
        assert len(notes) == (1 if torn and not _is_whole(torn) else 0), cut
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


@pytest.mark.parametrize("until", ["observation", "decision", "rollback"])
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
