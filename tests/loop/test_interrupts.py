"""Ctrl-C at each of many places in the guard's own work, in a loop and in the core: nothing is lost by it."""

import logging

import pytest

from interrupted import Interrupt, Observed, at_work, is_free, memory_of, written
from kl_guard_torch import TorchGuard
from loops import AS_IT_WAS, Loop

STEPS = 8
METHODS = {
    "calm": {"resume": 1, "step": 3, "save": 2, "close": 1},
    "halt": {"step": 7},
    "rollback": {"step": 7, "rollback": 1},
}
"""Of each kind of run, for each method: the call of it, from 1, that is interrupted."""
PLACES = 8


def run_of(folder, shape):
    action = "halt" if shape == "halt" else "rollback"
    return Loop(folder, action=action, grace=0, max_rollbacks=1, **AS_IT_WAS)


def train(loop, shape, steps=STEPS):
    """KL is far too high from step 5 on, in the first attempt."""
    wrong = shape != "calm"
    return loop.run(steps, lambda step, attempt: 1000.0 if wrong and step > 4 and not attempt else 0.01, save_every=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The states after each step of a run without trouble."""
    record = {}
    run_of(tmp_path_factory.mktemp("plain"), "calm").run(STEPS + 2, save_every=2, record=record)
    return record


@pytest.fixture(scope="module")
def calls():
    return {}


@pytest.mark.parametrize(
    ("shape", "method", "nth", "place"),
    [(s, m, nth, place) for s, methods in METHODS.items() for m, nth in methods.items() for place in range(PLACES)],
)
def test_an_interrupt_in_a_method(tmp_path, monkeypatch, caplog, undisturbed, calls, shape, method, nth, place):
    """It leaves the loop; the next process goes on, and every step is the one that it would have been."""
    if (shape, method) not in calls:
        loop, counter = run_of(tmp_path / "counted", shape), Interrupt()
        setattr(loop.guard, method, counter.within(getattr(loop.guard, method), nth))
        train(loop, shape)
        calls[shape, method] = counter.calls
    total = calls[shape, method]
    folder, observed = tmp_path / "run", Observed(monkeypatch)
    interrupt = Interrupt(1 + place * (total - 1) // PLACES, SystemExit if place % 2 else KeyboardInterrupt)
    caplog.clear()
    loop = run_of(folder, shape)
    setattr(loop.guard, method, interrupt.within(getattr(loop.guard, method), nth))
    with pytest.raises(interrupt.error), loop.guard:
        train(loop, shape)
    assert interrupt.raised_in
    memory_of(folder)
    assert set(observed.steps) <= written(folder) <= {*observed.steps, max(observed.steps, default=0) + 1}
    assert is_free(folder)
    assert not at_work()
    record = {}
    again = run_of(folder, "calm")
    made = again.run(STEPS + 2, save_every=2, record=record)
    assert {step: record[step] for step in made} == {step: undisturbed[step] for step in made}
    assert not again.guard.halted
    assert not again.guard.guard.blind
    assert list(memory_of(folder).history.steps) == list(range(1, STEPS + 3))
    assert {path.name for path in (folder / "kl_guard" / "pins").iterdir()} >= {"step-8", "step-10"}
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [text for text in said if "fault" in text or "another guard" in text or "torn" in text]


def test_all_methods_are_interrupted():
    """Those that a loop calls while it trains."""
    called = {"resume", "step", "save", "rollback", "close"}
    assert called == {method for methods in METHODS.values() for method in methods}
    public = {name for name in vars(TorchGuard) if not name.startswith("_") and callable(getattr(TorchGuard, name))}
    assert public - called == {"watch_loss"}
