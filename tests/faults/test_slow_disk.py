"""A disk that takes long for each write, as a file server under load does."""

import os
import time

import pytest

from kl_guard import KLGuard
from kl_guard.journal import read_journal
from kl_guard.memory import recall
from some_tokens import stats
from streams import blow_up

DELAY = 0.05


@pytest.fixture
def slow(monkeypatch):
    """Every write takes 50 ms; counts them."""
    real, count = os.write, [0]

    def write(fd, data):
        count[0] += 1
        time.sleep(DELAY)
        return real(fd, data)

    monkeypatch.setattr("kl_guard.lines.os.write", write)
    return count


def steps_in(folder):
    return list(recall(read_journal(folder / "kl_guard" / "journal.jsonl")[0]).history.steps)


def test_training_does_not_wait_for_a_slow_disk(tmp_path, slow):
    """After three slow writes a file is written once in five seconds: 3 + 3 of them for 300 steps, not 600."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    began = time.monotonic()
    for step in range(1, 301):
        guard.observe(step, tokens=stats())
    took = time.monotonic() - began
    assert slow[0] <= 6 + 2 * (1 + took / (DELAY * 100))
    guard.close()
    assert steps_in(tmp_path) == list(range(1, 301))
    assert len((tmp_path / "kl_guard" / "tokens.jsonl").read_text().splitlines()) == 300


def test_a_decision_does_not_wait_for_the_disk_to_rest(tmp_path, slow):
    """What is found and decided is on the disk at once, with all the observations before it."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    step = 0
    for step, value in enumerate(blow_up(), start=1):
        if guard.observe(step, value):
            break
    records, notes = read_journal(tmp_path / "kl_guard" / "journal.jsonl")
    assert not notes
    assert [record["type"] for record in records][-2:] == ["finding", "decision"]
    assert list(recall(records).history.steps) == list(range(1, step + 1))


def test_a_disk_that_is_fast_again_is_written_at_once(tmp_path, monkeypatch):
    """One slow moment changes nothing, a rest ends, and then each line is there when `observe` returns."""
    now, real = [0.0], os.write
    monkeypatch.setattr("kl_guard.lines.time.monotonic", lambda: now[0])
    guard = KLGuard(output_dir=tmp_path, announce=False)

    def slow(fd, data):
        now[0] += 1.0
        return real(fd, data)

    guard.observe(1, 0.02)
    with monkeypatch.context() as patch:
        patch.setattr("kl_guard.lines.os.write", slow)
        guard.observe(2, 0.02)
        guard.observe(3, 0.02)
    guard.observe(4, 0.02)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    with monkeypatch.context() as patch:
        patch.setattr("kl_guard.lines.os.write", slow)
        for step in range(5, 10):
            guard.observe(step, 0.02)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    now[0] += 99.0
    guard.observe(10, 0.02)
    assert steps_in(tmp_path) == list(range(1, 8))
    now[0] += 1.0
    guard.observe(11, 0.02)
    guard.observe(12, 0.02)
    assert steps_in(tmp_path) == list(range(1, 13))


def test_more_lines_than_fit_into_memory_while_a_disk_rests(tmp_path, monkeypatch):
    """A fast loop on a slow disk: none of 25,000 observations is lost, and few writes are made."""
    now, real, writes = [0.0], os.write, []
    monkeypatch.setattr("kl_guard.lines.time.monotonic", lambda: now[0])

    def slow(fd, data):
        now[0] += 1.0
        writes.append(len(data))
        return real(fd, data)

    monkeypatch.setattr("kl_guard.lines.os.write", slow)
    guard = KLGuard(output_dir=tmp_path, announce=False)
    for step in range(1, 25_001):
        guard.observe(step, 0.02)
    guard.close()
    assert len(writes) < 40
    assert steps_in(tmp_path) == list(range(1, 25_001))
