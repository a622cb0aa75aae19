"""What is restored is checked; what cannot be taken back is refused; damaged checkpoints are passed over."""

from pathlib import Path

import pytest
from transformers import TrainerCallback

from kl_guard_trl import KLGuardCallback
from kl_guard_trl.internals import why_not_back
from rollback_runs import SAVING, Tracker, guarded, said
from trl_runs import SetKL
from trl_state import Record

CHECKS = {
    "weights": lambda trainer: next(trainer.model.parameters()).data.view(-1)[:1].add_(1e-3),
    "optimizer steps": lambda trainer: [
        state["step"].add_(1) for state in trainer.optimizer.optimizer.state.values() if "step" in state
    ],
    "learning rate": lambda trainer: trainer.optimizer.param_groups[0].update(lr=1.0),
    "base learning rate": lambda trainer: setattr(trainer.lr_scheduler, "base_lrs", [1.0]),
    "scheduler": lambda trainer: setattr(trainer.lr_scheduler, "last_epoch", 99),
    "global step": lambda trainer: setattr(trainer.state, "global_step", 5),
}


@pytest.mark.newest
@pytest.mark.parametrize("name", CHECKS)
def test_a_failed_check_halts_and_names_itself(make_trainer, caplog, name):
    """Each part of what was restored made wrong behind the guard's back: no step is trained from it."""
    record, tracker = Record(), Tracker()
    guard, trainer = guarded(make_trainer, record, tracker)

    class Spoil(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if guard.rollbacks:
                CHECKS[name](trainer)

    trainer.callback_handler.callbacks.insert(0, Spoil())
    trainer.train()
    assert guard.halted
    assert f"{name}: " in guard.decision.note
    assert "failed its check" in guard.decision.note
    assert guard.decision.note in caplog.text
    assert len(record.steps) == guard.decision.reason.step
    assert tracker.events[-1] == "end"
    assert tracker.events.count("end") == 1


def test_a_checkpoint_that_the_trainer_cannot_load(make_trainer, monkeypatch):
    """The trainer's own error is a failed check, not an exception in the user's script."""
    guard, trainer = guarded(make_trainer)

    def broken(checkpoint):
        if checkpoint is not None:
            raise RuntimeError("size mismatch")

    monkeypatch.setattr(trainer, "_load_optimizer_and_scheduler", broken)
    trainer.train()
    assert guard.halted
    assert "size mismatch" in guard.decision.note


@pytest.mark.newest
def test_the_users_own_errors_go_through(make_trainer):
    """An exception in training, before or after a rollback, is the user's."""

    class Breaks(TrainerCallback):
        def __init__(self, step):
            self.step = step

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == self.step and (self.step < 8 or guard.rollbacks):
                raise ZeroDivisionError("mine")

    for step in (3, 12):
        guard, trainer = guarded(make_trainer, Breaks(step))
        with pytest.raises(ZeroDivisionError, match="mine"):
            trainer.train()
    _, trainer = guarded(make_trainer, output_dir=Path(trainer.args.output_dir) / "empty")
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_without_attach_it_halts_and_the_call_works(make_trainer, caplog):
    """The start says what is missing; the message at the halt holds the call, and it goes back."""
    guard, trainer = guarded(make_trainer, attach=False)
    trainer.train()
    assert guard.halted
    assert guard.decision.action == "halt"
    assert "needs callback.attach(trainer)" in caplog.text
    assert "going back to" not in caplog.text
    call = next(text for text in said(caplog) if "to go back" in text)
    statement = call[call.index("trainer.train(") : call.index(")", call.index("trainer.train(")) + 1]
    guard, trainer = guarded(make_trainer, attach=False, trouble=99)
    eval(statement, {"trainer": trainer})  # noqa: S307 - that the text is a call that works is what is tested
    assert trainer.state.global_step == 14
    assert not guard.halted
    assert guard.guard.history.steps[0] == 1


@pytest.mark.parametrize("action", ["halt", "warn"])
def test_attached_with_another_action(make_trainer, action):
    """Nothing but watching, then."""
    guard = KLGuardCallback(action=action)
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step >= 8 else 0.01), guard], **SAVING)
    guard.attach(trainer)
    trainer.train()
    assert guard.halted == (action == "halt")
    assert not guard.rollbacks
    assert not list((Path(trainer.args.output_dir) / "kl_guard" / "pins").glob("step-0"))


def test_attach_takes_trainers_only(make_trainer):
    """Wrong use is refused where it happens; right use twice is nothing."""
    guard = KLGuardCallback(action="rollback")
    with pytest.raises(TypeError, match="attach needs a trainer"):
        guard.attach(42)
    trainer = make_trainer([], **SAVING)
    train = trainer.train
    assert guard.attach(trainer) is guard
    assert guard in trainer.callback_handler.callbacks
    wrapped = trainer.train
    assert wrapped != train
    guard.attach(trainer)
    assert trainer.train == wrapped
    with pytest.raises(ValueError, match="attached to another trainer"):
        guard.attach(make_trainer([], **SAVING))
    with pytest.raises(TypeError, match="on_rollback must be a function"):
        KLGuardCallback(on_rollback=3)


def test_weights_only_checkpoints_are_refused(make_trainer, caplog):
    """Said at the start, with what works instead; the halt works."""
    guard, trainer = guarded(make_trainer, save_only_model=True)
    trainer.train()
    assert guard.halted
    assert not guard.rollbacks
    assert "save_only_model=True saves weights without optimizer" in caplog.text
    assert guard.decision.checkpoint is not None


def test_a_trainer_that_keeps_its_rollouts_elsewhere(make_trainer, caplog):
    """A version whose private names have changed: refused at the start, and the guard halts."""
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step >= 8 else 0.01)], **SAVING)
    guard = KLGuardCallback(action="rollback")
    buffered = trainer.__dict__.pop("_buffered_inputs")
    guard.attach(trainer)
    trainer._buffered_inputs = buffered
    trainer.train()
    assert guard.halted
    assert not guard.rollbacks
    assert "keeps its rollouts elsewhere (no _buffered_inputs)" in caplog.text


def test_what_cannot_be_taken_back_is_refused():
    """Async GRPO's worker cannot be started again; DeepSpeed's scheduler would forget; a sharded reference is lost."""
    from types import SimpleNamespace

    class AsyncGRPOTrainer:
        args = None
        callback_handler = None

    assert "start the script again" in why_not_back(AsyncGRPOTrainer())
    config = SimpleNamespace(config={"scheduler": {"type": "WarmupLR"}})
    trainer = SimpleNamespace(
        args=SimpleNamespace(hf_deepspeed_config=config), is_deepspeed_enabled=True, callback_handler=None
    )
    assert "the scheduler of DeepSpeed" in why_not_back(trainer)
    config.config = {}
    assert why_not_back(trainer) == ""
    trainer.args.sync_ref_model = True
    assert "sync_ref_model with a sharded model" in why_not_back(trainer)


@pytest.mark.newest
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
def test_damaged_checkpoints_are_passed_over(make_trainer, tmp_path, caplog, damage):
    """The pin of the target and its original are spoiled: the one before is gone back to, and the file is named."""
    guard, trainer = guarded(make_trainer)

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 7 and not guard.rollbacks:
                guard.guard.checkpoints._pins.wait()
                for folder in ("checkpoint-4", "kl_guard/pins/step-4"):
                    spoil(tmp_path / "run" / folder / "model.safetensors", damage)

    trainer.add_callback(Spoil())
    trainer.train()
    assert guard.rollbacks[0].checkpoint.step == 2
    assert trainer.state.global_step == 14
    assert str(tmp_path / "run" / "kl_guard" / "pins" / "step-4" / "model.safetensors") in caplog.text


def spoil(path, how):
    """Damage a file, without touching what is linked to it."""
    if not path.exists():
        return
    data = path.read_bytes()
    path.unlink()
    if how != "remove":
        flipped = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
        path.write_bytes({"truncate": data[:-9], "flip": flipped, "empty": b""}[how])
