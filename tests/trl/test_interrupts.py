"""Ctrl-C and SystemExit while the guard is at work in a trainer: they reach the user, and nothing is lost."""

import gc
import logging
from pathlib import Path

import pytest

from interrupted import Interrupt, Observed, at_work, is_free, memory_of, written
from kl_guard_trl import KLGuardCallback
from trl_runs import SetKL

pytestmark = pytest.mark.newest  # the guard's own parts are the same on every version

STEPS = 5
SETTINGS = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_completion_length": 2,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
}
HOOKS = sorted(name for name in vars(KLGuardCallback) if name.startswith("on_"))
CALM = {hook: 1 if hook in {"on_train_begin", "on_epoch_end", "on_train_end"} else 2 for hook in HOOKS}
HALT = {"on_step_end": 4, "on_log": 4, "on_save": 2, "on_epoch_end": 1, "on_train_end": 1}
BACK = {"on_train_begin": 2, "on_step_begin": 5, "on_train_end": 1}
SHAPES = {"calm": CALM, "halt": HALT, "rollback": BACK}
"""Of each kind of run, for each hook: the call of it, from 1, that is interrupted."""
PLACES = {0.0: KeyboardInterrupt, 0.5: SystemExit, 0.9: KeyboardInterrupt}
"""How far into that call, as a share of the guard's functions called in it, and what is raised there."""
SHORT = {"on_epoch_end", "on_optimizer_step", "on_step_begin", "on_train_end"}
CASES = [
    (shape, hook, nth, place)
    for shape, hooks in SHAPES.items()
    for hook, nth in hooks.items()
    for place in ([0.5] if hook in SHORT else PLACES)
]


@pytest.fixture(scope="module", autouse=True)
def _quick_to_collect():
    """Trainers collect garbage when they begin: what all tests have in common is not looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Run:
    """One run; `wrong` says whether KL is far too high from the second step on."""

    def __init__(self, make_trainer, shape, output_dir):
        self.wrong = shape != "calm"
        self.callback = KLGuardCallback(action="halt" if shape == "halt" else "rollback", max_rollbacks=1)
        kl = SetKL(lambda step: 1000.0 if self.wrong and step > 1 and not self.callback.rollbacks else 0.01)
        self.trainer = make_trainer([kl, self.callback], output_dir=output_dir, **SETTINGS)
        self.callback.attach(self.trainer)

    def interrupt(self, hook, nth, interrupt):
        """Train with an interrupt in the nth call of a hook."""
        setattr(self.callback, hook, interrupt.within(getattr(self.callback, hook), nth))
        try:
            self.trainer.train()
        finally:
            delattr(self.callback, hook)


@pytest.fixture(scope="module")
def calls():
    return {}


@pytest.fixture
def count(calls, make_trainer, tmp_path):
    """How many functions of the guard a hook calls when nothing interrupts it; each run is made once."""

    def of(shape, hook, nth):
        if (shape, hook) not in calls:
            run, counters = Run(make_trainer, shape, tmp_path / "counted"), {}
            for name, number in SHAPES[shape].items():
                counters[name] = Interrupt()
                setattr(run.callback, name, counters[name].within(getattr(run.callback, name), number))
            run.trainer.train()
            calls.update({(shape, name): counter.calls for name, counter in counters.items()})
        return calls[shape, hook]

    return of


@pytest.mark.parametrize(("shape", "hook", "nth", "place"), CASES)
def test_an_interrupt_in_a_hook(make_trainer, tmp_path, monkeypatch, caplog, count, shape, hook, nth, place):
    """It leaves `train()`, with journal, lock, threads and arguments in order; the run can be resumed to its end."""
    error = PLACES[place]
    total = count(shape, hook, nth)
    folder, observed = tmp_path / "run", Observed(monkeypatch)
    run, interrupt = Run(make_trainer, shape, folder), Interrupt(1 + int(place * (total - 1)), error)
    caplog.clear()
    with pytest.raises(error):
        run.interrupt(hook, nth, interrupt)
    assert interrupt.raised_in
    memory_of(folder)
    assert set(observed.steps) <= written(folder) <= {*observed.steps, max(observed.steps, default=0) + 1}
    assert is_free(folder)
    assert not at_work()
    assert Path(run.trainer.args.output_dir) == folder
    if error is SystemExit:  # another process, or the same trainer again, as in a notebook
        run = Run(make_trainer, shape, folder)
    run.wrong, run.trainer.args.max_steps = False, STEPS + 1
    run.trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    assert run.trainer.state.global_step == STEPS + 1
    assert not run.callback.halted
    assert not run.callback.guard.blind
    assert list(memory_of(folder).history.steps) == list(range(1, STEPS + 2))
    assert {path.name for path in (folder / "kl_guard" / "pins").iterdir()} >= {"step-4", "step-6"}
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [text for text in said if "fault" in text or "another guard" in text or "torn" in text]
