"""Ctrl-C at any place of an observation, a save or a resume: what was written stays, and the run goes on from it."""

from itertools import count

import pytest

from interrupted import Interrupt, at_work, is_free, memory_of
from kl_guard import GuardConfig, KLGuard
from kl_guard.history import History
from kl_guard.observation import Observation
from some_tokens import stats
from streams import blow_up

VALUES = blow_up(start=30)
CONFIG = GuardConfig(action="rollback", grace=0)
DECIDES = 41
GOES_ON = ["the same guard", "another one", "another process"]
PLACES = 20


def guard_at(folder, step):
    """A guard that has observed up to `step`, and knows of a checkpoint at 20."""
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "checkpoint-20" / "weights").write_text("w")
    guard = KLGuard(CONFIG, output_dir=folder, announce=False)
    observe(guard, 1, min(step, 20))
    if step >= 20:
        guard.checkpoint_saved(20, folder / "checkpoint-20")
        guard.checkpoints.wait()
    observe(guard, 21, step)
    return guard


def observe(guard, first, last):
    decision = guard.decision
    for step in range(first, last + 1):
        decision = guard.observe(step, tokens=stats(VALUES[step - 1]), reward=1.0)
        if decision:
            break
    return decision


def lines_of(folder, step, work):
    """How many lines of the guard's code a piece of work runs through; the second time nothing is imported."""
    for name in ("first", "second"):
        guard, counter = guard_at(folder / name, step), Interrupt(lines=True)
        with counter.on():
            work(guard)
        guard.close()
    return counter.calls


WORK = {
    "observe": (25, lambda guard: observe(guard, 26, 26)),
    "decide": (DECIDES - 1, lambda guard: observe(guard, DECIDES, DECIDES)),
    "save": (20, lambda guard: guard.checkpoint_saved(20, guard.folder.parent / "checkpoint-20")),
    "resume": (30, lambda guard: guard.resumed(20)),
    "close": (30, lambda guard: guard.close()),
}


def test_where_it_decides(tmp_path):
    """What the others rest on."""
    guard = guard_at(tmp_path, DECIDES - 1)
    assert not guard.decision
    decision = observe(guard, DECIDES, DECIDES)
    assert (decision.action, decision.checkpoint.step) == ("rollback", 20)
    guard.close()


@pytest.mark.parametrize("where", WORK)
@pytest.mark.parametrize("goes_on", GOES_ON)
def test_an_interrupt_at_any_place(tmp_path, caplog, where, goes_on):
    """Whoever goes on from there, and does the same again, decides as if nothing had been."""
    step, work = WORK[where]
    total = lines_of(tmp_path / "counted", step, work)
    report = total // 5 if where == "decide" else total  # from there on it is the report that is written
    stride = max(1, report // PLACES)
    first = 1 + GOES_ON.index(goes_on) * stride // len(GOES_ON)
    for at in (*range(first, report - stride // 2, stride), *range(report, total - stride, 8 * stride)):
        folder = tmp_path / f"{at}"
        guard, interrupt = guard_at(folder, step), Interrupt(at, lines=True)
        with pytest.raises(KeyboardInterrupt), interrupt.on():
            work(guard)
        memory_of(folder)
        if goes_on == "another process":
            guard.close()
            assert is_free(folder)
            assert not at_work()
        before, last = guard, guard.history.steps[-1]
        if goes_on != "the same guard":
            guard = KLGuard(CONFIG, output_dir=folder, announce=False)
            if not guard.recover():
                guard.resumed(last if where != "decide" else DECIDES - 1)
        elif where in {"save", "resume"}:
            work(guard)
            last = guard.history.steps[-1]
        decision = guard.decision or observe(guard, last, 60)
        assert (decision.action, decision.checkpoint.step) == ("rollback", 20), (at, interrupt.raised_in)
        assert not guard.blind
        before.close()
        guard.close()
        memory = memory_of(folder)
        assert list(memory.history.steps) == list(range(1, DECIDES + 1)), (at, interrupt.raised_in)
        assert memory.pending == 20
        assert [f.signature for f in memory.findings].count("KL_BLOWUP") == 1, (at, interrupt.raised_in)
        assert {path.name for path in (folder / "kl_guard" / "pins").glob("step-*")} == {"step-20"}
    assert not [r for r in caplog.records if "fault" in r.getMessage() or "torn" in r.getMessage()]


def test_an_interrupted_resume_that_is_not_said_again(tmp_path, caplog):
    """The guard goes on with what it knows, and is not blind."""
    step, work = WORK["resume"]
    total = lines_of(tmp_path / "counted", step, work)
    for at in range(1, total - PLACES, total // PLACES):
        guard = guard_at(tmp_path / f"{at}", step)
        with pytest.raises(KeyboardInterrupt), Interrupt(at, lines=True).on():
            work(guard)
        decision = observe(guard, guard.history.steps[-1] + 1, 60)
        assert decision.action == "rollback"
        assert not guard.blind
        guard.close()
    assert not caplog.records


def observations(first, last):
    return [Observation(step, kl_mean=step / 7, reward=None if step < 7 else 1.0) for step in range(first, last + 1)]


def history_of(steps):
    history = History()
    for one in steps:
        history.append(one)
    return history


@pytest.mark.parametrize(
    "work",
    [
        lambda history: history.append(observations(7, 7)[0]),
        lambda history: history.extend(history_of(observations(7, 9))),
        lambda history: history.truncate(4),
    ],
    ids=["append", "extend", "truncate"],
)
def test_a_history_interrupted_at_any_line(work):
    """No value comes to stand at another step than its own."""
    for at in count(1):
        history, interrupt = history_of(observations(1, 6)), Interrupt(at, lines=True)
        try:
            with interrupt.on():
                work(history)
        except KeyboardInterrupt:
            pass
        last = history[-1].step
        assert history[-1] == observations(last, last)[0]
        for one in observations(last + 1, 12):
            history.append(one)
        assert list(history) == observations(1, 12)
        assert list(History.unpacked(history.packed())) == observations(1, 12)
        if not interrupt.raised_in:
            break
    assert at > 5
