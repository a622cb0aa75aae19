"""Ctrl-C and SystemExit while the guard is at work in a fit: it ends as any other does, and nothing is lost."""

import logging
import signal

import lightning.pytorch as pl
import pytest

from interrupted import Interrupt, Observed, at_work, is_free, memory_of, written
from kl_guard_lightning import KLGuardCallback, fit_with_rollback
from lightning_runs import Policy, Resumable, each, trainer_of

STEPS = 6
TROUBLE = 3  # from this step on KL is far too high; that is decided upon two steps later
CALM = {"setup": 1, "on_fit_start": 1, "on_train_start": 1, "on_train_end": 1, "on_fit_end": 1, "teardown": 1}
CALM |= {"on_train_batch_start": 3, "on_before_optimizer_step": 3, "on_train_batch_end": 3, "state_dict": 2}
HALT = {"on_train_batch_end": TROUBLE + 2, "on_train_end": 1, "on_fit_end": 1, "teardown": 1}
BACK = {"on_train_batch_end": TROUBLE + 2, "on_exception": 1, "setup": 2, "load_state_dict": 1, "on_fit_start": 2}
BACK |= {"on_train_start": 2}
SHAPES = {"calm": CALM, "halt": HALT, "rollback": BACK, "fails": {"on_exception": 1}}
"""Of each kind of run, for each hook: the call of it, from 1, that is interrupted."""
PLACES = {0.0: KeyboardInterrupt, 0.4: SystemExit, 0.8: KeyboardInterrupt}
"""How far into that call, as a share of the guard's functions called in it, and what is raised there."""


@pytest.fixture(autouse=True)
def _ctrl_c_as_before():
    """A trainer that was interrupted has the process ignore Ctrl-C from then on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Fails(Policy):
    """Fails in its fourth step, so that somebody hears of an exception."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


class Run:
    """One run, with checkpoints of each second step."""

    def __init__(self, folder, shape):
        action = "halt" if shape == "halt" else "rollback"
        self.callback = callback = KLGuardCallback(action=action, max_rollbacks=1, grace=0)
        wrong = shape in {"halt", "rollback"}
        self.module = (Fails if shape == "fails" else Policy)(
            lambda step: 1000.0 if wrong and step >= TROUBLE and not callback.rollbacks else 0.01
        )
        self.folder, self.callbacks = folder, [callback, each(2)]

    def fit(self, steps=STEPS, ckpt_path=None):
        trainer = trainer_of(self.folder, self.callbacks, max_steps=steps)
        fit_with_rollback(trainer, self.module, Resumable(), ckpt_path=ckpt_path)
        return trainer


def ended(work):
    """What came out of a fit."""
    try:
        work()
    except BaseException as error:
        return type(error)
    return None


class Plain(pl.Callback):
    """Raises in one hook, as a callback does that has nothing to do with the guard."""

    def __init__(self, hook, nth, error):
        def raises(*_):
            raise error

        self.calls = 0
        setattr(self, hook, lambda *_: setattr(self, "calls", self.calls + 1) or (self.calls == nth and raises()))


def without_guard(folder, hook, error):
    """How a fit ends without a guard, where another callback raises."""
    module = Policy()
    if hook == "on_exception":
        module, nth = Fails(), 1
    else:
        hook, nth = "on_train_batch_end", 3
    trainer = trainer_of(folder, [Plain(hook, nth, error), each(2)], max_steps=STEPS)
    return ended(lambda: trainer.fit(module, Resumable()))


@pytest.fixture(scope="module")
def calls():
    return {}


@pytest.fixture
def count(calls, tmp_path):
    """How many functions of the guard a hook calls when nothing interrupts it; each run is made once."""

    def of(shape, hook, nth):
        if (shape, hook) not in calls:
            run, counters = Run(tmp_path / "counted", shape), {}
            for name, number in SHAPES[shape].items():
                counters[name] = Interrupt()
                setattr(run.callback, name, counters[name].within(getattr(run.callback, name), number))
            ended(run.fit)
            calls.update({(shape, name): counter.calls for name, counter in counters.items()})
        return calls[shape, hook]

    return of


def test_no_hook_is_left_out():
    """What the callback does in a trainer's name is all interrupted below."""
    hooks = {name for name in vars(KLGuardCallback) if hasattr(pl.Callback, name) and not name.startswith("_")}
    assert hooks - {"state_key"} == {hook for hooks in SHAPES.values() for hook in hooks}


@pytest.mark.parametrize(
    ("shape", "hook", "nth", "place"),
    [(shape, hook, nth, place) for shape, hooks in SHAPES.items() for hook, nth in hooks.items() for place in PLACES],
)
def test_an_interrupt_in_a_hook(tmp_path, monkeypatch, caplog, count, shape, hook, nth, place):
    """The fit ends as it does without a guard, with journal, lock and threads in order, and can be resumed."""
    error = PLACES[place]
    total = count(shape, hook, nth)
    folder, observed = tmp_path / "run", Observed(monkeypatch)
    run, interrupt = Run(folder, shape), Interrupt(1 + int(place * (total - 1)), error)
    setattr(run.callback, hook, interrupt.within(getattr(run.callback, hook), nth))
    caplog.clear()
    end = ended(run.fit)
    assert interrupt.raised_in
    assert end is without_guard(tmp_path / "plain", hook, error)
    memory_of(folder)
    assert set(observed.steps) <= written(folder) <= {*observed.steps, max(observed.steps, default=0) + 1}
    assert is_free(folder)
    assert not at_work()
    saved = {int(path.stem.partition("=")[2]): path for path in folder.rglob("checkpoints/step=*.ckpt")}
    run = Run(folder, "calm")
    trainer = run.fit(STEPS + 2, saved[max(saved)] if saved else None)
    assert trainer.global_step == STEPS + 2
    assert not run.callback.halted
    assert not run.callback.guard.blind
    assert list(memory_of(folder).history.steps) == list(range(1, STEPS + 3))
    assert {path.name for path in (folder / "kl_guard" / "pins").iterdir()} >= {"step-6", "step-8"}
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [text for text in said if "fault" in text or "another guard" in text or "torn" in text]
