"""A halt: at that very batch, with nothing bad saved under a name that means good."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch

from kl_guard import KLGuardHalted
from kl_guard_lightning import KLGuardCallback
from lightning_runs import OldPolicy, Policy, Record, Resumable, each, loader, said, trainer_of


def trouble(begin=8):
    """Return a KL that is far above the ceiling from a step on: three of them are critical."""
    return lambda step: 1000.0 if step >= begin else 0.01


def saved(folder):
    return sorted(path.name for path in Path(folder).rglob("*.ckpt"))


@pytest.mark.parametrize(("package", "policy"), [(pl, Policy), (pytorch_lightning, OldPolicy)])
def test_both_packages_take_the_same_callback(tmp_path, package, policy):
    """In a list or alone; the run ends at the step of the alarm."""
    guard = KLGuardCallback()
    assert isinstance(guard, package.Callback)
    trainer = package.Trainer(
        default_root_dir=tmp_path,
        callbacks=guard,
        max_steps=14,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(policy(trouble()), loader())
    assert trainer.global_step == 10
    assert guard.halted
    assert guard.decision.reason.step == 10


@pytest.mark.parametrize("limits", [{"min_steps": 13}, {"min_epochs": 3, "max_steps": -1, "max_epochs": 4}])
def test_least_steps_do_not_keep_it_going(tmp_path, limits):
    """`min_steps` and `min_epochs` are lifted for this stop, and are back for the next fit."""
    record, guard = Record(), KLGuardCallback()
    trainer = trainer_of(tmp_path, [record, guard], **limits)
    trainer.fit(Policy(trouble()), loader())
    assert record.steps[-1] == 10
    assert guard.halted
    assert (trainer.min_steps, trainer.min_epochs) == (limits.get("min_steps"), limits.get("min_epochs", 1))


@pytest.mark.parametrize(
    "saving",
    [
        {"every_n_train_steps": 5, "save_top_k": 1},
        {"every_n_train_steps": 5, "save_top_k": 1, "save_last": True},
        {"every_n_train_steps": 5, "save_top_k": 0, "save_last": True},
        {"every_n_train_steps": 5, "save_top_k": -1, "save_last": "link"},
        {"every_n_train_steps": 5, "save_top_k": 2, "monitor": "entropy"},
        {"every_n_train_steps": 5, "save_top_k": 1, "save_on_exception": True},
        {"every_n_epochs": 1, "save_top_k": 1},
        {"every_n_epochs": 1, "save_top_k": 1, "save_last": True},
    ],
)
@pytest.mark.parametrize("on_halt", ["return", "raise"])
def test_the_halting_step_is_saved_by_nobody(tmp_path, saving, on_halt):
    """Whatever triggers a save in the same step, at the end of the epoch, of the fit, or on an exception."""
    guard = KLGuardCallback(on_halt=on_halt, output_dir=tmp_path / "guard")
    if not set(saving) <= set(inspect.signature(pl.callbacks.ModelCheckpoint).parameters):
        pytest.skip("this version cannot save so")
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", filename="{step}", **saving)
    trainer = trainer_of(tmp_path, [saver, guard])
    with pytest.raises(KLGuardHalted) if on_halt == "raise" else contextlib.nullcontext():
        trainer.fit(Policy(trouble()), loader())
    assert guard.decision.reason.step == 10
    assert guard.halted
    assert trainer.global_step == 10
    files = [torch.load(path)["global_step"] for path in (tmp_path / "saved").glob("*.ckpt")]
    assert set(files) == ({5} if "every_n_train_steps" in saving else set())
    assert saved(tmp_path / "guard" / "kl_guard" / "halted") == ["step=10.ckpt"]
    if files and saving["save_top_k"]:
        assert Path(saver.best_model_path).exists()
    assert not any(name.startswith("on_") for name in vars(saver))


def test_nobody_saves_on_an_exception_that_the_guard_raises(tmp_path):
    """Lightning's OnExceptionCheckpoint would keep the diverged weights as what to resume from."""
    guard = KLGuardCallback(on_halt="raise")
    rescue = pl.callbacks.OnExceptionCheckpoint(tmp_path / "rescue")
    with pytest.raises(KLGuardHalted):
        trainer_of(tmp_path, [rescue, guard]).fit(Policy(trouble()), loader())
    assert not saved(tmp_path / "rescue")


def test_an_exception_of_the_user_is_saved_as_ever(tmp_path):
    """The guard changes nothing about it, and lets go of the trainer."""

    class Fails(Policy):
        def on_train_batch_end(self, *_):
            if self.global_step == 6:
                raise ZeroDivisionError

    guard = KLGuardCallback()
    rescue = pl.callbacks.OnExceptionCheckpoint(tmp_path / "rescue")
    trainer = trainer_of(tmp_path, [rescue, guard])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(), loader())
    assert saved(tmp_path / "rescue") == ["on_exception.ckpt"]
    assert "save_checkpoint" not in vars(trainer)


def test_the_halted_state_can_be_gone_on_from(tmp_path):
    """It is a complete checkpoint; the next fit saves again."""
    guard = KLGuardCallback()
    saver = each(5, dirpath=tmp_path / "saved")
    trainer = trainer_of(tmp_path, [saver, guard])
    module = Policy(trouble())
    trainer.fit(module, Resumable())
    module.kl = lambda step: 0.01
    trainer.fit(module, Resumable(), ckpt_path=tmp_path / "kl_guard" / "halted" / "step-10" / "step=10.ckpt")
    assert trainer.global_step == 14
    assert not guard.halted


def test_it_says_how_to_go_back(tmp_path, caplog):
    """The file itself, ready for `ckpt_path`, though the pin is a folder."""
    guard = KLGuardCallback()
    trainer = trainer_of(tmp_path, [each(2, dirpath=tmp_path / "saved", save_top_k=1), guard])
    trainer.fit(Policy(trouble()), loader())
    path = tmp_path / "kl_guard" / "pins" / "step-4" / "step=4.ckpt"
    assert any(f"trainer.fit(module, ckpt_path={str(path)!r})" in line for line in said(caplog))
    again = trainer_of(tmp_path, [KLGuardCallback()])
    again.fit(Policy(), loader(), ckpt_path=path)
    assert again.global_step == 14


def test_without_room_or_wish_nothing_is_kept(tmp_path):
    """`save_halted=False`."""
    guard = KLGuardCallback(save_halted=False)
    trainer_of(tmp_path, [guard]).fit(Policy(trouble()), loader())
    assert guard.halted
    assert not (tmp_path / "kl_guard" / "halted").exists()


def test_validation_metrics_that_others_need_are_there(tmp_path):
    """Lightning validates at a stop; an EarlyStopping that monitors it finds its metric."""

    class Validates(Policy):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch).mean())
            self.log("kl_mean", 5000.0)

    guard = KLGuardCallback()
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=100)
    trainer = trainer_of(tmp_path, [stopping, guard], num_sanity_val_steps=2)
    trainer.fit(Validates(trouble()), loader(), loader(8))
    assert trainer.global_step == 10
    assert max(guard.guard.history.column("kl_mean")[:7]) == 0.01


def test_loggers_get_the_last_step_and_the_level(tmp_path):
    """With the guard's own figures, under names of their own."""
    logger = pl.loggers.CSVLogger(tmp_path)
    guard = KLGuardCallback()
    trainer = trainer_of(tmp_path, [guard], logger=logger, log_every_n_steps=1)
    trainer.fit(Policy(trouble()), loader())
    text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = text[0].split(",").index("kl_guard/level")
    levels = [line.split(",")[column] for line in text[1:] if line.split(",")[column]]
    assert len(levels) == 10
    assert float(levels[0]) == 0
    assert float(levels[-1]) == 2
