"""Going back: from the right checkpoint, exactly, with what is to be different, and never in a loop."""

from __future__ import annotations

import random
import time
import zipfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from kl_guard import KLGuardHalted
from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard_lightning import KLGuardCallback, fit_with_rollback
from lightning_runs import Numbers, OldPolicy, Policy, Record, Resumable, each, loader, said, trainer_of

AS_IT_WAS = {"lr_factor": 1.0, "new_noise": False}


def guarded(folder, *callbacks, knobs=None, trouble=8, saver=None, policy=None, on_rollback=None, **settings):
    """Return guard, trainer and module of a run with trouble from step `trouble` on, in the first attempt only."""
    guard = KLGuardCallback(action="rollback", on_rollback=on_rollback, **(knobs or {}))
    module = (policy or Policy)(lambda step: 1000.0 if step >= trouble and not guard.rollbacks else 0.01)
    saver = saver or each(2, dirpath=folder / "saved")
    return guard, trainer_of(folder, [*callbacks, guard, saver], **settings), module


def stateful(count=64, **settings):
    return StatefulDataLoader(Numbers(count), batch_size=4, shuffle=True, **settings)


def shuffled(count=64):
    """Draws the order of each epoch from torch's stream, and does not keep its place."""
    return DataLoader(Numbers(count), batch_size=4, shuffle=True)


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


SETTINGS = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "short epochs": {"count": 24},
    "validation": {"val": True, "check_val_every_n_epoch": 1},
}


@pytest.mark.parametrize("data", [Resumable, stateful, shuffled])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_a_resume_from_the_same_checkpoint(tmp_path, data, name):
    """Bit for bit: weights, moments, random state, with factors of 1 and the noise unchanged."""
    settings = dict(SETTINGS[name])
    count, val = settings.pop("count", 64), settings.pop("val", False)

    class Validates(Policy):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch).mean())

    policy, others = (Validates, (loader(8),)) if val else (Policy, ())
    record, again = Record(), Record()
    guard, trainer, module = guarded(tmp_path, record, knobs=AS_IT_WAS, policy=policy, **settings)
    fit_with_rollback(trainer, module, data(count=count), *others)
    assert trainer.global_step == 14
    assert [d.checkpoint.step for d in guard.rollbacks] == [4]
    torch.manual_seed(99)
    fresh = trainer_of(tmp_path / "fresh", [again, KLGuardCallback()], **settings)
    fresh.fit(policy(), data(count=count), *others, ckpt_path=tmp_path / "saved" / "step=4.ckpt")
    states = {step: record.states[step] for step in again.states if step > 4}
    assert states == {step: again.states[step] for step in states}
    assert list(states) == list(range(5, 15))


@pytest.mark.parametrize("data", [Resumable, shuffled])
def test_a_checkpoint_at_the_end_of_an_epoch(tmp_path, data):
    """What Lightning saves by default: bit for bit as well, and between two epochs every loader keeps its place."""
    record, again = Record(), Record()
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "saved", "{step}", save_top_k=-1)
    guard, trainer, module = guarded(tmp_path, record, knobs=AS_IT_WAS, saver=saver)
    fit_with_rollback(trainer, module, data(count=16))
    (decision,) = guard.rollbacks
    assert (decision.checkpoint.step, decision.checkpoint.aligned) == (4, True)
    torch.manual_seed(99)
    fresh = trainer_of(tmp_path / "fresh", [again, KLGuardCallback()])
    fresh.fit(Policy(), data(count=16), ckpt_path=tmp_path / "saved" / "step=4.ckpt")
    assert again.states == {step: record.states[step] for step in range(5, 15)}


def test_it_is_the_run_that_was_never_interrupted(tmp_path):
    """With a loader that keeps its place and noise that is the same."""
    states = []
    for trouble in (8, 100):
        torch.manual_seed(1)
        record = Record()
        _, trainer, module = guarded(tmp_path / str(trouble), record, knobs=AS_IT_WAS, trouble=trouble)
        fit_with_rollback(trainer, module, Resumable(count=24))
        states.append(record.states)
    assert states[0] == states[1]


def test_manual_optimization_goes_back_too(tmp_path):
    """Two optimizer steps in each batch."""
    record, again = Record(), Record()

    def policy(kl=lambda step: 0.01):
        return Policy(kl, steps_per_batch=2)

    guard, trainer, module = guarded(tmp_path, record, knobs=AS_IT_WAS, policy=policy, trouble=16, max_steps=28)
    fit_with_rollback(trainer, module, Resumable())
    assert trainer.global_step == 28
    target = guard.rollbacks[0].checkpoint.step
    fresh = trainer_of(tmp_path / "fresh", [again, KLGuardCallback()], max_steps=28)
    fresh.fit(policy(), Resumable(), ckpt_path=tmp_path / "saved" / f"step={target}.ckpt")
    assert {step: record.states[step] for step in again.states} == again.states


def test_the_other_package(tmp_path):
    """A trainer of `pytorch_lightning`."""
    guard = KLGuardCallback(action="rollback")
    module = OldPolicy(lambda step: 1000.0 if step >= 8 and not guard.rollbacks else 0.01)
    saver = each(2, pytorch_lightning, dirpath=tmp_path / "saved")
    trainer = trainer_of(tmp_path, [guard, saver], pytorch_lightning)
    fit_with_rollback(trainer, module, Resumable())
    assert trainer.global_step == 14
    assert not guard.halted
    assert len(guard.rollbacks) == 1


def test_the_start_is_a_way_back(tmp_path):
    """Trouble before the first checkpoint: the run begins anew, as if it had never begun."""
    states = []
    for trouble in (3, 100):
        torch.manual_seed(1)
        record = Record()
        folder = tmp_path / str(trouble)
        guard, trainer, module = guarded(folder, record, knobs=AS_IT_WAS, trouble=trouble)
        fit_with_rollback(trainer, module, Resumable())
        assert [d.checkpoint.step for d in guard.rollbacks] == ([0] if trouble == 3 else [])
        states.append(record.states)
    assert states[0] == states[1]


def test_what_is_done_otherwise(tmp_path, caplog):
    """Half the learning rate, to the end and in checkpoints; other noise; twice it is a quarter."""
    record = Record()
    knobs = {"max_rollbacks": 2, "grace": 0}
    guard, trainer, module = guarded(tmp_path, record, knobs=knobs, max_steps=30)
    module.kl = lambda step: 1000.0 if step >= 8 + 10 * len(guard.rollbacks) and len(guard.rollbacks) < 2 else 0.01
    fit_with_rollback(trainer, module, Resumable())
    assert len(guard.rollbacks) == 2
    second = guard.rollbacks[1].checkpoint.step
    for step, rate in record.rates.items():
        factor = 1 if step <= 4 else 0.5 if step <= second else 0.25
        assert rate == pytest.approx(factor * 1e-2 / (1 + step / 10)), step
    held = torch.load(tmp_path / "saved" / "step=30.ckpt", weights_only=True)
    assert held["lr_schedulers"][0]["base_lrs"] == [pytest.approx(0.25e-2)]
    assert any("learning rate x0.25 of the original, new sampling noise" in line for line in said(caplog))


def test_a_function_of_ones_own(tmp_path):
    """`on_rollback` takes the place of what is configured; what it raises does not stop the run."""
    seen = []

    def change(context):
        seen.append((context.attempt, context.checkpoint.step, context.module.lr))
        context.scale_learning_rate(0.1)
        with pytest.raises(ValueError, match="factor must be a finite number above 0"):
            context.scale_learning_rate(0)

    record = Record()
    _, trainer, module = guarded(tmp_path, record, on_rollback=change)
    fit_with_rollback(trainer, module, Resumable())
    assert seen == [(1, 4, 1e-2)]
    assert record.rates[14] == pytest.approx(0.1 * 1e-2 / 2.4)
    with pytest.raises(TypeError, match="on_rollback must be a function"):
        KLGuardCallback(on_rollback=3)


@pytest.mark.parametrize("save_last", [False, True])
def test_files_are_found_where_they_are_looked_for(tmp_path, save_last):
    """The newest file is the one gone back to, under its own name, put back where rotation took it."""
    looked = []

    def look(context):
        folder = tmp_path / "saved"
        looked.append({path.name: step_of(path) for path in folder.glob("*.ckpt")})

    saver = each(2, dirpath=tmp_path / "saved", save_top_k=1, save_last=save_last)
    _, trainer, module = guarded(tmp_path, knobs={}, saver=saver, on_rollback=look)
    fit_with_rollback(trainer, module, Resumable())
    assert looked == [{"step=4.ckpt": 4} | ({"last.ckpt": 4} if save_last else {})]
    left = {path.name: step_of(path) for path in (tmp_path / "saved").glob("*.ckpt")}
    assert left == {"step=14.ckpt": 14} | ({"last.ckpt": 14} if save_last else {})
    assert step_of(saver.best_model_path) == 14


def test_last_alone_is_enough(tmp_path):
    """One file that is written over and over: its pins keep what it held."""
    saver = each(2, dirpath=tmp_path / "saved", save_top_k=0, save_last=True)
    guard, trainer, module = guarded(tmp_path, saver=saver)
    fit_with_rollback(trainer, module, Resumable())
    assert [d.checkpoint.step for d in guard.rollbacks] == [4]
    assert step_of(tmp_path / "saved" / "last.ckpt") == 14
    pins = {int(path.parent.name[5:]): step_of(path) for path in tmp_path.glob("kl_guard/pins/step-*/*.ckpt")}
    assert all(step == held for step, held in pins.items())
    assert len(pins) >= 3
    assert not list((tmp_path / "saved").glob("*kl-guard*"))


def test_a_pin_is_not_written_over(tmp_path, monkeypatch):
    """Where a file system writes into the file that is there, its hard link must not follow."""
    import shutil

    def in_place(source, target):
        Path(target).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(shutil, "move", in_place)
    monkeypatch.setattr("kl_guard.checkpoints.pins.SMALL", 1)  # links for files of any size
    saver = each(2, dirpath=tmp_path / "saved", save_top_k=0, save_last=True)
    guard, trainer, module = guarded(tmp_path, saver=saver)
    fit_with_rollback(trainer, module, Resumable())
    assert [d.checkpoint.step for d in guard.rollbacks] == [4]
    pins = {int(path.parent.name[5:]): step_of(path) for path in tmp_path.glob("kl_guard/pins/step-*/*.ckpt")}
    assert all(step == held for step, held in pins.items())


class Folders(pl.plugins.io.TorchCheckpointIO):
    """Writes a checkpoint as a folder of files, each of them in place, as sharded strategies do."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).mkdir(parents=True, exist_ok=True)
        weights = checkpoint.pop("state_dict")
        for name, part in (("weights.pt", weights), ("rest.pt", checkpoint)):
            with (Path(path) / name).open("wb") as file:
                torch.save(part, file)

    def load_checkpoint(self, path, *_, **__):
        checkpoint = torch.load(Path(path) / "rest.pt", weights_only=True)
        return {**checkpoint, "state_dict": torch.load(Path(path) / "weights.pt", weights_only=True)}


@pytest.mark.parametrize("saving", [{"save_top_k": 1}, {"save_top_k": 0, "save_last": True}])
def test_checkpoints_that_are_folders(tmp_path, saving, monkeypatch):
    """Pinned and gone back to like files, also where one name is written over and over."""
    monkeypatch.setattr("kl_guard.checkpoints.pins.SMALL", 1)  # links for files of any size
    record, again = Record(), Record()
    saver = each(2, dirpath=tmp_path / "saved", **saving)
    guard, trainer, module = guarded(tmp_path, record, saver=saver, knobs=AS_IT_WAS, plugins=[Folders()])
    fit_with_rollback(trainer, module, Resumable())
    assert [d.checkpoint.step for d in guard.rollbacks] == [4]
    pin = tmp_path / "kl_guard" / "pins" / "step-12"
    assert torch.load(pin / "rest.pt", weights_only=True)["global_step"] == 12
    assert not list((tmp_path / "saved").glob("*kl-guard*"))
    fresh = trainer_of(tmp_path / "fresh", [again, KLGuardCallback()], plugins=[Folders()])
    fresh.fit(Policy(), Resumable(), ckpt_path=pin)
    assert again.states == {step: record.states[step] for step in (13, 14)}


def test_checkpoints_that_are_written_in_the_background(tmp_path):
    """Taken note of once they are whole; a pin is never half a file."""
    plugin = pl.plugins.io.AsyncCheckpointIO()
    saver = each(2, dirpath=tmp_path / "saved", save_top_k=-1)

    class Waits(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            for path in (tmp_path / "saved").glob("*.ckpt"):
                while not zipfile.is_zipfile(path):
                    time.sleep(0.01)

    guard, trainer, module = guarded(tmp_path, Waits(), saver=saver, plugins=[plugin])
    fit_with_rollback(trainer, module, Resumable())
    if not hasattr(plugin, "_ensure_setup"):  # before 2.6 it cannot save in a second fit
        assert guard.halted
        assert guard.decision.checkpoint.step == 4
        return
    assert [d.checkpoint.step for d in guard.rollbacks] == [4]
    assert trainer.global_step == 14


def test_the_best_of_several_is_not_one_that_is_gone(tmp_path):
    """The memory of a callback that keeps the best comes back as old as the checkpoint, without what rotation took."""

    class Scores(Policy):
        def training_step(self, batch, batch_idx):
            self.log("score", float(-self.global_step))
            return super().training_step(batch, batch_idx)

    memories = []
    saver = each(2, dirpath=tmp_path / "saved", save_top_k=2, monitor="score")

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if guard.rollbacks and not memories:
                memories.append((Path(saver.best_model_path).name, sorted(Path(p).name for p in saver.best_k_models)))

    guard, trainer, module = guarded(tmp_path, Looks(), saver=saver, policy=Scores)
    fit_with_rollback(trainer, module, Resumable())
    assert memories == [("step=4.ckpt", ["step=4.ckpt"])]
    assert sorted(path.name for path in (tmp_path / "saved").glob("*.ckpt")) == ["step=12.ckpt", "step=14.ckpt"]


def test_the_budget_is_not_rewound(tmp_path):
    """A checkpoint brings back callback state, but never a rollback that was spent."""
    knobs = {"max_rollbacks": 2, "grace": 0}
    guard, trainer, module = guarded(tmp_path, knobs=knobs, max_steps=60)
    module.kl = lambda step: 1000.0 if step >= 8 + 10 * len(guard.rollbacks) else 0.01
    fit_with_rollback(trainer, module, Resumable())
    assert guard.halted
    assert len(guard.rollbacks) == 2
    assert "all 2 rollbacks are used up" in guard.decision.note


def test_the_same_place_twice_halts(tmp_path):
    """It is the data or the code."""
    guard, trainer, module = guarded(tmp_path, knobs={"grace": 0})
    module.kl = lambda step: 1000.0 if step >= 8 else 0.01
    fit_with_rollback(trainer, module, Resumable())
    assert guard.halted
    assert len(guard.rollbacks) == 1
    assert "at step 6 it had failed before" in guard.decision.note


@pytest.mark.parametrize("on_halt", ["return", "raise"])
def test_a_state_that_is_not_the_saved_one_is_not_trained(tmp_path, on_halt, caplog):
    """Weights that come back otherwise: the guard halts, and names the check."""

    class Spoils(Policy):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["net.0.bias"] += 1

    record = Record()
    rescue = pl.callbacks.OnExceptionCheckpoint(tmp_path / "rescue")
    guard, trainer, module = guarded(tmp_path, record, rescue, policy=Spoils, knobs={"on_halt": on_halt})
    if on_halt == "raise":
        with pytest.raises(KLGuardHalted):
            fit_with_rollback(trainer, module, Resumable())
    else:
        fit_with_rollback(trainer, module, Resumable())
    assert record.steps == list(range(1, 11))
    assert guard.halted
    assert "failed its check: rank 0: weights" in guard.decision.note
    assert not (tmp_path / "rescue").exists()
    assert "on_exception" not in vars(rescue)


def test_a_checkpoint_that_cannot_be_loaded_halts(tmp_path):
    """In the second fit, before its first batch; what a user's own code raises later is the user's."""

    class Refuses(Policy):
        def on_load_checkpoint(self, checkpoint):
            raise KeyError("not mine")

    guard, trainer, module = guarded(tmp_path, policy=Refuses)
    fit_with_rollback(trainer, module, Resumable())
    assert guard.halted
    assert "the trainer cannot load it" in guard.decision.note

    class Fails(Policy):
        def on_train_batch_end(self, *_):
            if guard.rollbacks:
                raise ZeroDivisionError

    guard, trainer, module = guarded(tmp_path / "own", policy=Fails)
    with pytest.raises(ZeroDivisionError):
        fit_with_rollback(trainer, module, Resumable())
    assert "save_checkpoint" not in vars(trainer)


def test_loggers_see_one_run(tmp_path):
    """No logger is told that a run has failed, or is over, in between."""
    ends = []

    class Logs(pl.loggers.CSVLogger):
        def finalize(self, status):
            ends.append(status)
            super().finalize(status)

    _, trainer, module = guarded(tmp_path, logger=Logs(tmp_path / "logs"), log_every_n_steps=1)
    fit_with_rollback(trainer, module, Resumable())
    assert ends == ["success"]


def test_the_journal_tells_the_whole_story(tmp_path):
    """Decision, rollback and change, in this order; observations keep their attempt."""
    _, trainer, module = guarded(tmp_path)
    fit_with_rollback(trainer, module, Resumable())
    records, notes = read_journal(tmp_path / "kl_guard" / "journal.jsonl")
    assert not notes
    kinds = [r["type"] for r in records if r["type"] in {"decision", "rollback", "change", "resume"}]
    assert kinds == ["decision", "rollback", "change"]
    memory = recall(records)
    assert list(memory.history.steps) == list(range(1, 15))
    assert (memory.attempt, memory.rollbacks) == (1, 1)


class Killed(BaseException):
    """Ends a fit as the end of its process would."""


class Kill(pl.Callback):
    """Ends the fit at a step of an attempt."""

    def __init__(self, attempt, step):
        self.attempt, self.step, self.guard = attempt, step, None

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step and len(self.guard.rollbacks) == self.attempt:
            raise Killed


def test_a_restart_goes_on_with_the_attempt(tmp_path, caplog):
    """Factors and budget hold in a new process, from an older checkpoint too."""
    kill = Kill(1, 9)
    guard, trainer, module = guarded(tmp_path, kill, knobs={"max_rollbacks": 1})
    kill.guard = guard
    with pytest.raises(Killed):
        fit_with_rollback(trainer, module, Resumable())
    for target, first in (("step=8.ckpt", 9), ("step=4.ckpt", 5)):
        record = Record()
        again, trainer, module = guarded(tmp_path, record, knobs={"max_rollbacks": 1}, trouble=100)
        fit_with_rollback(trainer, module, Resumable(), ckpt_path=tmp_path / "saved" / target)
        assert again.guard.attempt == 1
        assert record.steps[0] == first
        assert record.rates[14] == pytest.approx(0.5 * 1e-2 / 2.4)
    again, trainer, module = guarded(tmp_path, knobs={"max_rollbacks": 1, "grace": 0}, trouble=14, max_steps=30)
    fit_with_rollback(trainer, module, Resumable(), ckpt_path=tmp_path / "saved" / "step=8.ckpt")
    assert again.halted
    assert "rollbacks are used up" in again.decision.note


def test_a_rollback_that_was_decided_is_finished(tmp_path, monkeypatch):
    """The process was killed in between."""
    from kl_guard_lightning.way_back import WayBack

    saver = each(2, dirpath=tmp_path / "saved", save_last=True)
    guard, trainer, module = guarded(tmp_path, saver=saver)
    with monkeypatch.context() as patch:
        patch.setattr(WayBack, "make_ready", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            fit_with_rollback(trainer, module, Resumable())
    guard.guard.close()
    record = Record()
    saver = each(2, dirpath=tmp_path / "saved", save_last=True)
    again, trainer, module = guarded(tmp_path, record, saver=saver, trouble=100)
    fit_with_rollback(trainer, module, Resumable(), ckpt_path="last")
    assert again.guard.attempt == 1
    assert record.steps == list(range(5, 15))
    assert record.rates[14] == pytest.approx(0.5 * 1e-2 / 2.4)


def test_weights_alone_are_no_way_back(tmp_path, caplog):
    """Said at the start; the state at the start is one."""
    saver = each(2, dirpath=tmp_path / "saved", save_weights_only=True)
    guard, trainer, module = guarded(tmp_path, saver=saver)
    fit_with_rollback(trainer, module, Resumable())
    assert [d.checkpoint.step for d in guard.rollbacks] == [0]
    assert any("save_weights_only is on" in line for line in said(caplog))


def test_data_that_do_not_keep_their_place_are_said(tmp_path, caplog):
    """It goes back all the same, with the batches of the epoch begun anew."""
    guard, trainer, module = guarded(tmp_path)
    fit_with_rollback(trainer, module, loader())
    assert trainer.global_step == 14
    assert not guard.halted
    assert len(guard.rollbacks) == 1
    assert any("the data loader does not keep its place" in line for line in said(caplog))


def test_random_state_comes_back_from_a_checkpoint(tmp_path):
    """Of Python, numpy and torch; plain values only, so that a safe load reads it."""

    class Draws(Policy):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.drawn = {}

        def training_step(self, batch, batch_idx):
            self.drawn[self.global_step] = (random.random(), np.random.rand(), torch.rand(1).item())
            return super().training_step(batch, batch_idx)

    module = Draws()
    trainer_of(tmp_path, [KLGuardCallback(), each(5, dirpath=tmp_path / "saved")]).fit(module, Resumable())
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        again = Draws()
        trainer = trainer_of(tmp_path / "again", [KLGuardCallback()])
        trainer.fit(again, Resumable(), ckpt_path=tmp_path / "saved" / "step=10.ckpt")
        assert list(again.drawn) == [10, 11, 12, 13]
        assert again.drawn == {step: module.drawn[step] for step in again.drawn}
    state = torch.load(tmp_path / "saved" / "step=10.ckpt", weights_only=True)["callbacks"]["KLGuardCallback"]
    assert set(state) == {"format", "random"}  # neither budget nor history


def test_what_it_needs_is_asked_for(tmp_path):
    """A trainer, and a guard in it."""
    with pytest.raises(TypeError, match="needs a trainer of Lightning, got int"):
        fit_with_rollback(3, Policy())
    with pytest.raises(ValueError, match="the trainer has no KLGuardCallback"):
        fit_with_rollback(trainer_of(tmp_path), Policy())
