"""Old observations put together in blocks, old tokens thinned out: nothing that the guard decides by is lost."""

import contextlib
import gc
import io
import json
import logging
import math
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_guard import GuardConfig, KLGuard, blocks, replay, shortening, thinned_tokens
from kl_guard.cli import main
from kl_guard.findings import Finding, Severity
from kl_guard.history import History
from kl_guard.journal import Journal, read_journal
from kl_guard.lines import LinesFile, encode
from kl_guard.logs import read_rows
from kl_guard.memory import Memory, recall
from kl_guard.observation import METRICS, Observation
from kl_guard.report.story import story_of
from some_tokens import stats

SCRIPT = Path(__file__).parent / "blocks_run.py"
CONFIG = GuardConfig(action="rollback", grace=0)


def journal_of(folder):
    return folder / "kl_guard" / "journal.jsonl"


@pytest.fixture
def small(monkeypatch):
    """Blocks of some observations, so that few lines make many of them."""
    make_small(monkeypatch.setattr)


def make_small(setattr_, every=1 << 13):
    setattr_(shortening, "EVERY", every)
    for name, value in {"KEEP": 20, "SIZE": 40, "FEWEST": 3, "WORTH": 0}.items():
        setattr_(blocks, name, value)


def shortened(path, times=1):
    """The journal at `path` as blocks, written next to it."""
    for _ in range(times):
        lines = b"".join(blocks.in_blocks(path, path.stat().st_size))
        path = path.with_name(f"short-{path.name}")
        path.write_bytes(lines)
    return path


def facts_of(memory):
    """All that a memory has, to be compared bit by bit."""
    history = memory.history
    columns = {name: history.column(name).tobytes() for name in METRICS}
    rest = {f.name: getattr(memory, f.name) for f in fields(Memory)}
    rest |= {"history": None, "findings": [encode(finding.to_dict()) for finding in memory.findings]}
    return rest, columns, history.steps.tobytes(), history._windows.tobytes(), history._present.tobytes()


def known(rows):
    return [{name: repr(value) for name, value in row.items()} for row in rows]


# Any journal.

numbers = st.one_of(
    st.floats(0, 10),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**30), 10**30),
    st.sampled_from(["nan", "-inf", "1e400", -0.0, None, "no number", True]),
)
observations = st.builds(
    lambda step, window, attempt, values: {
        "type": "observation",
        "attempt": attempt,
        "step": step,
        **values,
        **({} if window is None else {"window": window}),
    },
    st.integers(0, 40) | st.sampled_from([2**53, -1, 2.5]),
    st.sampled_from([None, 1, 1, 5, 60]),
    st.sampled_from([0, 0, 0, 1]),
    st.dictionaries(st.sampled_from(["kl_mean", "kl_max", "reward", "padding", "unheard_of"]), numbers, max_size=4),
)
ascending = st.builds(
    lambda start, values: [
        {"type": "observation", "attempt": 0, "step": start + i // 2, "kl_mean": kl} for i, kl in enumerate(values)
    ],
    st.integers(0, 30),
    st.lists(numbers, min_size=1, max_size=12),
)
others = st.one_of(
    st.builds(lambda s: {"type": "resume", "step": s}, st.integers(0, 40)),
    st.builds(lambda s, a: {"type": "rollback", "to_step": s, "attempt": a}, st.integers(0, 40), st.integers(1, 4)),
    st.builds(lambda s: {"type": "checkpoint", "step": s, "path": f"checkpoint-{s}", "calm": True}, st.integers(0, 40)),
    st.builds(
        lambda s: {"type": "finding", "finding": Finding("KL_SPIKES", Severity.INFO, s, None, None, {}).to_dict()},
        st.integers(0, 40),
    ),
    st.builds(
        lambda s: {"type": "decision", "signature": "KL_BLOWUP", "step": s, "to_step": max(0, s - 9)},
        st.integers(0, 40),
    ),
    st.builds(lambda v: {"type": "facts", "facts": {"trainer": v}}, st.integers(0, 3)),
    st.just({"type": "run", "run_id": "abc", "config": {}}),
    st.sampled_from([b"\x00\x00", b'{"type":"observation","attempt":0,"st', b"", b"\xff{}", b"[1]"]),
)


def written(records):
    return b"".join((r if isinstance(r, bytes) else encode(r).encode()) + b"\n" for r in records)


@given(
    st.lists(st.one_of(observations.map(lambda o: [o]), ascending, others.map(lambda o: [o])), max_size=30),
    st.lists(ascending | others.map(lambda o: [o]), max_size=8),
    st.integers(0, 5),
    st.integers(0, 40),
)
@settings(max_examples=100, deadline=None)
def test_any_journal_in_blocks_says_the_same(tmp_path_factory, first, later, keep, back):
    """Whatever it holds, however often it is shortened, with records written in between, and wherever one goes back."""
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch.setattr)
        patch.setattr(blocks, "KEEP", keep)
        patch.setattr(blocks, "SIZE", 8)
        path = tmp_path_factory.mktemp("any") / "journal.jsonl"
        path.write_bytes(written(chain.from_iterable(first)))
        once = shortened(path)
        if not once.stat().st_size:
            once.write_bytes(path.read_bytes())
        for file in (path, once):
            with file.open("ab") as end:
                end.write(written(chain.from_iterable(later)))
        twice = shortened(once)
        memories = [recall(read_journal(file)[0]) for file in (path, once, *([twice] if twice.stat().st_size else []))]
        for memory in memories[1:]:
            assert facts_of(memory) == facts_of(memories[0])
        for memory in memories:
            memory.roll_back(back, 9)
        for memory in memories[1:]:
            assert facts_of(memory) == facts_of(memories[0])


def test_blocks_are_there_and_short(tmp_path, small):
    """What the other tests rest on: a journal of a thousand steps becomes blocks, a fifth as long."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(
        written({"type": "observation", "attempt": 0, "step": i, "kl_mean": i / 7, "reward": 1.0} for i in range(1000))
    )
    short = shortened(path)
    kinds = [record["type"] for record in read_journal(short)[0]]
    assert kinds.count("block") == 25
    assert kinds.count("observation") == 20 == blocks.KEEP
    assert short.stat().st_size < path.stat().st_size / 2


def test_checkpoints_and_findings_between_observations_do_not_hinder(tmp_path, small):
    """A run that saves at every other step, and has a finding now and then."""
    path = tmp_path / "journal.jsonl"
    records = []
    for i in range(1000):
        records.append({"type": "observation", "attempt": 0, "step": i, "kl_mean": i / 7})
        if i % 2:
            records.append({"type": "checkpoint", "step": i, "path": f"checkpoint-{i}", "calm": True})
        if i % 7 == 0:
            finding = Finding("KL_SPIKES", Severity.INFO, i, None, None, {})
            records.append({"type": "finding", "finding": finding.to_dict()})
    path.write_bytes(written(records))
    short = shortened(path)
    kinds = [record["type"] for record in read_journal(short)[0]]
    assert (kinds.count("block"), kinds.count("checkpoint"), kinds.count("finding")) == (25, 500, 143)
    memories = [recall(read_journal(file)[0]) for file in (path, short)]
    assert facts_of(memories[0]) == facts_of(memories[1])


# A guard that shortens its journal, beside one that does not.


def kl_at(step, chance):
    kl = 0.02 * math.exp(chance.gauss(0, 0.2)) * (1.6 ** max(0, step % 331 - 315))
    return chance.choices([kl, None, math.nan, math.inf, 10**25], [400, 8, 4, 0.3, 0.3])[0]


def go_on(guard, steps, chance):
    """Observe steps; return what was decided."""
    said = []
    for step in steps:
        for _ in range(chance.choice([1, 1, 1, 2])):
            rest = {"reward": chance.random(), "entropy": chance.choice([None, 1.0])}
            decision = guard.observe(step, kl_at(step, chance), window=chance.choice([1, 1, 3]), **rest)
            said.append((decision.action, [encode(f.to_dict()) for f in decision.findings]))
    return said


def go_through(folder, seed, *, short):
    """A run with processes that end, a resume to a step in the middle, and a rollback."""
    chance = random.Random(seed)
    said, checks = [], []
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch.setattr, 1 << 13 if short else 1 << 40)
        at = 0
        for _ in range(4):
            guard = KLGuard(CONFIG, output_dir=folder, announce=False)
            if at:
                at = chance.randint(at // 2, at)
                guard.resumed(at)
            for _ in range(6):
                said += go_on(guard, range(at + 1, at + 41), chance)
                at += 40
                guard.checkpoint_saved(at, checkpoint(folder, at))
                if guard.decision.action == "halt":
                    guard.resumed(at)
                elif guard.decision.action == "rollback":
                    back = guard.go_back()
                    at = at // 2 if back is None else back.step
                    guard.rolled_back(at)
            checks.append(facts_of(guard._memory)[1:])
            guard.close()
            assert not guard.blind
    return said, checks, at


def checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "weights").write_text("w")
    return path


def without_times(records):
    return [{k: v for k, v in record.items() if k not in {"time", "run_id"}} for record in records]


@pytest.mark.parametrize("seed", range(2))
def test_a_guard_with_blocks_is_the_same_as_one_without(tmp_path, seed):
    """The same decisions, memory, replay, report, and the same judgement of what comes next, wherever it resumes."""
    runs = [tmp_path / name for name in ("short", "long")]
    (said, checks, at), long = (go_through(run, seed, short=run.name == "short") for run in runs)
    assert (said, checks, at) == long
    short, whole = (journal_of(run) for run in runs)
    assert b'"type":"block"' in short.read_bytes()
    assert b'"type":"block"' not in whole.read_bytes()
    memories = [recall(read_journal(path)[0]) for path in (short, whole)]
    (rest, *columns), (rest_long, *columns_long) = map(facts_of, memories)
    assert columns == columns_long
    assert {**rest, "run_id": 0} == {**rest_long, "run_id": 0}
    assert memories[0].unreadable == 0
    assert known(read_rows(short)) == known(read_rows(whole))
    ours, theirs = replay(short), replay(whole)
    assert encode({"f": [f.to_dict() for f in ours.findings]}) == encode({"f": [f.to_dict() for f in theirs.findings]})
    assert (ours.fired_at, ours.observations, ours.notes) == (theirs.fired_at, theirs.observations, theirs.notes)
    stories = [story_of(path.parent) for path in (short, whole)]
    assert [len(attempt.history) for attempt in stories[0].attempts] == [len(a.history) for a in stories[1].attempts]
    assert [f.to_dict() for f in stories[0].findings] == [f.to_dict() for f in stories[1].findings]
    for back in (at, 0, *(memories[0].history.steps[i] for i in (55,))):
        nexts = []
        for run in runs:
            guard = KLGuard(CONFIG, output_dir=run, announce=False, rank=1)  # reads, and writes nothing
            guard.resumed(back)
            before = list(guard.history.steps)
            nexts.append((before, go_on(guard, range(back + 1, back + 51), random.Random(1)), guard.suspicion))
        assert nexts[0] == nexts[1]


def test_the_commands_on_a_journal_with_blocks(tmp_path, small, capsys):
    """`replay`, `report` and `watch` find what they find without blocks."""
    guard = KLGuard(GuardConfig(action="warn"), output_dir=tmp_path, announce=False)
    for step in range(1, 301):
        guard.observe(step, 0.02 * 1.6 ** max(0, step - 280), reward=1.0)
    guard.close()
    whole = tmp_path / "whole" / "kl_guard" / "journal.jsonl"
    whole.parent.mkdir(parents=True)
    whole.write_bytes(
        written(
            {"type": "observation", "attempt": 0, **observation.known()} if isinstance(observation, Observation) else r
            for r in read_journal(journal_of(tmp_path))[0]
            for observation in (History.unpacked(r) if r["type"] == "block" else [r])
        )
    )
    said = []
    for path in (journal_of(tmp_path), whole):
        assert main(["replay", str(path), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(["watch", str(path), "--interval", "0.01", "--idle", "0.05"]) == 1
        assert main(["report", str(path.parent.parent), "--output", str(tmp_path / "page.html")]) in (0, 1)
        capsys.readouterr()
        said.append((json.dumps(answer).replace(str(path), ""), out.getvalue().replace(str(path), "")))
    assert b'"type":"block"' in journal_of(tmp_path).read_bytes()
    assert said[0] == said[1]
    assert "KL_BLOWUP" in said[0][1]


# Killed, full, slow, cut.


@pytest.mark.parametrize("where", ["write", "fsync", "before rename", "after rename", *range(6)])
def test_killed_while_it_shortens(tmp_path, where):
    """Each line that was written before is there afterwards, in the journal; the next guard shortens it again."""
    at = where if isinstance(where, str) else f"{0.02 + 0.07 * where}"
    run = [sys.executable, str(SCRIPT), str(tmp_path), at]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    written_until = int(done.stdout.split()[-1])
    records, notes = read_journal(journal_of(tmp_path))
    memory = recall(records)
    assert list(memory.history.steps)[:written_until] == list(range(1, written_until + 1))
    assert list(memory.history.column("reward"))[:written_until] == [s / 7 for s in range(1, written_until + 1)]
    assert memory.unreadable == 0
    assert len(notes) <= 1
    lines = (tmp_path / "kl_guard" / "tokens.jsonl").read_bytes().splitlines(keepends=True)
    tokens = [json.loads(line)["step"] for line in lines if line.endswith(b"\n")]  # a kill may cut the last one
    recent = range(max(1, written_until - 19), written_until + 1)
    assert set(recent) <= set(tokens)
    assert tokens == sorted(set(tokens))
    assert next(iter(read_rows(tmp_path)))["step"] == 1
    done = subprocess.run([*run[:-1], "go on"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "kl_guard").glob(".draft-*"))
    assert list(recall(read_journal(journal_of(tmp_path))[0]).history.steps) == list(range(1, int(done.stdout) + 1))


def slowly(gate, waits=None):
    """Let the shortening wait in the middle of its lines until `gate` is set; `waits` says that it does."""
    whole = blocks.in_blocks

    def slow(path, upto):
        for i, line in enumerate(whole(path, upto)):
            if i == 1:
                if waits is not None:
                    waits.set()
                gate.wait(20)
            yield line

    return slow


def row(step):
    return {"type": "observation", "attempt": 0, "step": step, "kl_mean": step / 3}


def test_what_is_written_while_it_shortens_is_there(tmp_path, small, monkeypatch):
    """Thousands of lines come during a slow one; whichever file a reader opens has all lines until then."""
    gate = threading.Event()
    monkeypatch.setattr("kl_guard.journal.in_blocks", slowly(gate))
    journal = Journal(tmp_path)
    for step in range(3000):
        journal.write(row(step))
        if step == 2500:
            assert journal._file._shortening.running
            gate.set()
        if step > 2500 and step % 100 == 0:
            time.sleep(0.002)
            assert list(recall(read_journal(journal.path)[0]).history.steps) == list(range(step + 1))
    journal.close()
    assert b'"type":"block"' in journal.path.read_bytes()
    history = recall(read_journal(journal.path)[0]).history
    assert list(history.steps) == list(range(3000))
    assert list(history.column("kl_mean")) == [step / 3 for step in range(3000)]


def a_file(tmp_path, shorten, *, lines=400):
    file = LinesFile(tmp_path / "journal.jsonl", shorten)
    for step in range(lines):
        file.append(written([row(step)]))
        file.flush()
    return file


def steps_in(path):
    return list(recall(read_journal(path)[0]).history.steps)


@pytest.mark.parametrize(
    "fault", ["raises", "full", "no room", "no thread", "draft lost", "rename", "unlink", "folder"]
)
def test_shortening_that_fails_costs_nothing(tmp_path, small, monkeypatch, caplog, fault):
    """The guard is not blind, the file has all, and at most one warning says so."""

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def cannot(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    if fault == "raises":
        monkeypatch.setattr(History, "packed", cannot)
    elif fault == "full":
        monkeypatch.setattr("shutil.copyfileobj", refuse)
    elif fault == "no room":
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    elif fault == "no thread":
        monkeypatch.setattr("threading.Thread.start", cannot)
    elif fault == "draft lost":
        begin = shortening.Shortening._write
        monkeypatch.setattr(shortening.Shortening, "_write", lambda s: (begin(s), s._draft.unlink(missing_ok=True)))
    elif fault == "rename":
        monkeypatch.setattr(Path, "replace", refuse)
    elif fault == "unlink":
        monkeypatch.setattr(Path, "replace", refuse)
        monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None if not self.exists() else refuse())
    elif fault == "folder":
        plain = shortening.sync
        monkeypatch.setattr(shortening, "sync", lambda path: refuse() if path.is_dir() else plain(path))
    guard = KLGuard(output_dir=tmp_path, announce=False)
    for step in range(1, 601):
        guard.observe(step, 0.02, reward=step / 7)
    guard.close()
    monkeypatch.undo()
    assert not guard.blind
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING and "KL_" not in r.getMessage()]) <= 1
    records, notes = read_journal(journal_of(tmp_path))
    assert notes == []
    assert [r["type"] for r in records].count("run") == 1
    assert any(r["type"] == "block" for r in records) == (fault == "folder")
    assert list(recall(records).history.steps) == list(range(1, 601))


def test_a_file_that_was_deleted_meanwhile_is_not_brought_back(tmp_path, small):
    """What is begun anew stays, even where it has the inode of the old one."""
    gate, waits = threading.Event(), threading.Event()
    file = a_file(tmp_path, slowly(gate, waits))
    assert waits.wait(10)
    file.path.unlink()
    file.close()
    file.append(written([row(7)]))
    file.flush()
    file._shortening._inode = file._shortening._inode and file.path.stat().st_ino  # as some disks give it
    gate.set()
    file.finish()
    assert steps_in(file.path) == [7]


def test_a_draft_that_another_guard_still_writes_is_no_part_of_it(tmp_path, small):
    """A slow thread of an earlier guard, given up, has the same name for its draft."""
    gate, waits = threading.Event(), threading.Event()
    earlier = a_file(tmp_path, slowly(gate, waits))
    assert waits.wait(10)
    later = LinesFile(earlier.path, blocks.in_blocks)
    for step in range(400, 800):
        later.append(written([row(step)]))
        later.flush()
    gate.set()
    earlier.finish()
    later.finish()
    assert steps_in(later.path) == list(range(800))
    assert not list(tmp_path.glob(".draft-*"))


def test_a_broken_block_costs_that_block(tmp_path, small, caplog):
    """Torn or with other bytes in it: the rest is read, and a note says that something is missing."""
    path = tmp_path / "kl_guard" / "journal.jsonl"
    path.parent.mkdir()
    path.write_bytes(written([{"type": "run", "run_id": "abc"}, *map(row, range(1, 301))]))
    lines = shortened(path).read_bytes().splitlines(keepends=True)
    assert json.loads(lines[2])["type"] == "block"
    gone = set(range(41, 81))
    values = json.loads(lines[2])["columns"]["kl_mean"][0]
    for broken in (
        lines[2][:200] + b"\n",
        lines[2].replace(values.encode(), values[:20].encode()),
        b"\x00" * 50 + b"\n",
    ):
        path.write_bytes(b"".join([*lines[:2], broken, *lines[3:]]))
        caplog.clear()
        guard = KLGuard(output_dir=tmp_path, announce=False)
        guard.resumed(300)
        guard.close()
        assert list(guard.history.steps) == [step for step in range(1, 301) if step not in gone]
        assert len([r for r in caplog.records if "left out" in r.getMessage()]) == 1
        result = replay(path)
        assert result.observations == 260
        assert len(result.notes) == 1
        assert len(story_of(path.parent).notes) == 1


def test_tokens_that_stay(tmp_path, monkeypatch):
    """The recent ones, the largest, those next to findings; and done again the same ones."""
    for name, value in {"RECENT": 20, "EVENLY": 10, "LARGEST": 2}.items():
        monkeypatch.setattr(thinned_tokens, name, value)
    path = tmp_path / "tokens.jsonl"
    rows = [{"step": step, "kl_max": 9.0 if step in (33, 77) else 1.0} for step in range(1, 201)]
    path.write_bytes(written([*rows[:50], b"torn", *rows[50:]]))
    kept = b"".join(thinned_tokens.worth_keeping(path, path.stat().st_size, marked={120}))
    steps = [json.loads(line)["step"] for line in kept.splitlines() if line != b"torn"]
    assert {33, 77, *range(117, 124), *range(181, 201)} <= set(steps)
    assert len(steps) <= 20 + 2 + 7 + 10 + 2
    path.write_bytes(kept)
    assert b"".join(thinned_tokens.worth_keeping(path, path.stat().st_size, marked={120})) == kept


# Long.


def soak(folder, until, resume_every, look=None):
    """A run with tokens in many processes; return the last guard and the largest files on the way."""
    largest = {"journal.jsonl": 0, "tokens.jsonl": 0}
    guard = None
    for step in range(1, until + 1):
        if (step - 1) % resume_every == 0:
            if guard is not None:
                guard.close()
                for name in largest:
                    largest[name] = max(largest[name], (folder / "kl_guard" / name).stat().st_size)
            guard = KLGuard(output_dir=folder, announce=False)
            if step > 1:
                guard.resumed(step - 1)
        guard.observe(step, tokens=stats(0.02 + 0.005 * math.sin(step), 1.5 + step % 7), reward=step / 7)
        if look is not None:
            look(step)
    guard.close()
    assert not guard.blind
    return guard, largest


def keep_pace(step):
    """Let files be shortened between two steps, which take longer in training."""
    for thread in threading.enumerate():
        if thread.name == "kl-guard-shortening":
            thread.join()


def test_many_processes_with_tokens(tmp_path, monkeypatch):
    """5,000 observations, a process every 500: the files stay short, and nothing is missing."""
    make_small(monkeypatch.setattr, 1 << 18)
    for name, value in {"RECENT": 100, "EVENLY": 50, "LARGEST": 10, "NEAR_MOST": 20}.items():
        monkeypatch.setattr(thinned_tokens, name, value)
    guard, largest = soak(tmp_path, 5000, 500, keep_pace)
    alone = KLGuard(announce=False)
    for step in range(1, 5001):
        alone.observe(step, tokens=stats(0.02 + 0.005 * math.sin(step), 1.5 + step % 7), reward=step / 7)
    for memory in (guard._memory, recall(read_journal(journal_of(tmp_path))[0])):
        assert facts_of(memory)[1:] == facts_of(alone._memory)[1:]
        assert [f.to_dict() for f in memory.findings] == [f.to_dict() for f in alone.findings]
    assert largest["journal.jsonl"] < 2_500_000 / 4
    assert largest["tokens.jsonl"] < 1 << 20
    assert {p.name for p in (tmp_path / "kl_guard").iterdir()} <= {"journal.jsonl", "tokens.jsonl", "lock"}


def bytes_of(guard):
    """What the columns of a guard take: its history, and what the detectors keep of it."""
    history, monitor = guard.history, guard._panel._monitor
    columns = [c for c in history._columns if c is not None]
    columns += [history.steps, history._windows, history._present]
    columns += [monitor.steps, monitor.trimmed, monitor.extremes, monitor.series.values]
    return sum(map(sys.getsizeof, columns))


@pytest.mark.parametrize("level", [0.02, 0.9])
def test_an_observation_leaves_numbers_in_columns(level):
    """Objects remain only in the sorted windows of the rule, three numbers an observation where all are followed."""
    guard = KLGuard(GuardConfig(action="warn"), announce=False)
    rng = random.Random(0)
    blocks_at = {}
    for step in range(1, 6001):
        guard.observe(step, tokens=stats(level * math.exp(rng.gauss(0, 0.3)), 1.5 + step % 7), reward=step / 7)
        if step in (3000, 6000):
            for window in guard.windows():
                _ = window.early_median, window.late_mean, window.late_median, window.trend()
            gc.collect()
            blocks_at[step] = sys.getallocatedblocks()
    assert blocks_at[6000] - blocks_at[3000] < 3 * 3000
    assert bytes_of(guard) < 190 * 6000


@pytest.mark.soak
def test_two_hundred_thousand_observations(tmp_path):
    """With tokens, and a process every 5,000: memory grows by what the history needs, the files hardly.

    An observation takes some 170 bytes, 21 numbers in columns. Resident memory grows by up to three times that, since
    all the guards live in one process here, and what their columns leave behind as they grow is not given back at once.
    """
    until, every = int(os.environ.get("KL_GUARD_SOAK", "200000")), 5000
    process, resident, objects = psutil.Process(), {}, {}

    def look(step):
        keep_pace(step)
        if step % (until // 20) == 0:
            resident[step] = process.memory_info().rss
            objects[step] = sys.getallocatedblocks()

    guard, largest = soak(tmp_path, until, every, look)
    growth = {}
    for name, measured in (("resident", resident), ("objects", objects)):
        second = [value for step, value in measured.items() if until // 5 < step <= 2 * until // 5]
        last = [value for step, value in measured.items() if step > 4 * until // 5]
        growth[name] = (sum(last) / len(last) - sum(second) / len(second)) / (0.6 * until)
    print(f"an observation: {growth}, {bytes_of(guard) / until:.0f} bytes in columns; largest files {largest}")
    assert bytes_of(guard) < 190 * until
    assert growth["objects"] < 0.2
    assert growth["resident"] < 800
    assert largest["tokens.jsonl"] < 20 << 20
    assert largest["journal.jsonl"] < (8 << 20) + 50 * until
    assert list(recall(read_journal(journal_of(tmp_path))[0]).history.steps) == list(guard.history.steps)
    assert list(guard.history.steps) == list(range(1, until + 1))
