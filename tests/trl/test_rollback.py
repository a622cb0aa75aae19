"""Going back by itself: the same as a resume by hand, once, checked, and never for ever."""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
from transformers import TrainerCallback

from kl_guard import KLGuardHalted
from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard_trl import KLGuardCallback
from kl_guard_trl.internals import why_not_back
from trl_runs import Events, SetKL, training_logs
from trl_state import Record

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 14}
AS_IT_WAS = {"lr_factor": 1.0, "beta_factor": 1.0, "new_noise": False}


def guarded(make_trainer, *callbacks, knobs=None, trouble=8, on_rollback=None, attach=True, **arguments):
    """Train with a guard that sees trouble from step `trouble` on, in the first attempt only."""
    guard = KLGuardCallback(action="rollback", on_rollback=on_rollback, **(knobs or {}))
    shown = SetKL(lambda step: 1000.0 if step >= trouble and not guard.rollbacks else 0.01)
    trainer = make_trainer([shown, guard, *callbacks], **{**SAVING, **arguments})
    for callback in callbacks:
        callback.trainer = trainer
    if attach:
        guard.attach(trainer)
    return guard, trainer


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "kl_guard"]


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "generations of four": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "iterations": {"num_iterations": 2},
    "both": {"steps_per_generation": 2, "num_iterations": 2, "save_steps": 4, "trouble": 9},
    "warm-up and decay": {"lr_scheduler_type": "cosine", "warmup_steps": 4},
    "rloo": {"kind": "rloo"},
    "rloo generations": {"kind": "rloo", "steps_per_generation": 2},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5},
    "lora": {"lora": True},
    "start": {"save_steps": 100},
    "start, moving reference": {"save_steps": 100, "sync_ref_model": True, "ref_model_sync_steps": 2},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_steps_after_the_target_are_those_of_a_resume(make_trainer, tmp_path, settings):
    """With nothing changed: weights, optimizer state and random state, bit for bit, at every step."""
    record = Record()
    guard, trainer = guarded(make_trainer, record, knobs=AS_IT_WAS, output_dir=tmp_path / "a", **settings)
    trainer.train()
    (decision,) = guard.rollbacks
    target = decision.checkpoint.step
    assert trainer.state.global_step == 14
    assert not guard.halted
    assert target == (0 if settings.get("save_steps") == 100 else 4)
    assert record.steps == [*range(1, decision.reason.step + 1), *range(target + 1, 15)]

    original = tmp_path / "a" / f"checkpoint-{target}"
    fresh = Record()
    arguments = {key: value for key, value in settings.items() if key != "trouble"}
    again = make_trainer([fresh], output_dir=tmp_path / "b", **{**SAVING, **arguments})
    if settings.get("sync_ref_model"):
        again.ref_model.load_state_dict(reference_at(original, again.ref_model))
    fresh.trainer = again
    again.train(resume_from_checkpoint=str(original))
    assert fresh.steps == list(range(target + 1, 15))
    assert fresh.states == {step: record.states[step] for step in fresh.steps}


def reference_at(path, model):
    """The reference that the guard put into a checkpoint."""
    from safetensors.torch import load_file

    found = load_file(Path(path) / "kl_guard_reference.safetensors")
    return {**model.state_dict(), **found}


def test_what_is_changed(make_trainer, caplog):
    """Learning rate in every later step, beta, noise from the first step on; said in one line."""
    record = Record()
    guard, trainer = guarded(make_trainer, record, lr_scheduler_type="linear")
    with caplog.at_level(logging.WARNING, logger="kl_guard"):
        trainer.train()
    target = guard.rollbacks[0].checkpoint.step
    rates = {row["step"]: row["learning_rate"] for row in training_logs(trainer)}
    for step, rate in rates.items():
        expected = 1e-4 * (1 - (step - 1) / 14) * (0.5 if step > target else 1)
        assert rate == pytest.approx(expected), step
    assert trainer.beta == pytest.approx(0.2)
    assert guard.guard.history[-1].beta == pytest.approx(0.2)
    (line,) = [text for text in said(caplog) if "back at step" in text]
    assert "learning rate x0.5 of the original, beta x2 (now 0.2), new sampling noise" in line
    assert "weights" in line


def test_new_noise_from_the_first_step_on(make_trainer, tmp_path):
    """Nothing else changed: the first step after going back already differs from the first time."""
    rewards = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "reward" in logs:
                rewards.append((state.global_step, logs["reward"], logs["completions/mean_length"]))

    for noise in (False, True):
        rewards.clear()
        knobs = {**AS_IT_WAS, "new_noise": noise}
        guard, trainer = guarded(make_trainer, Watch(), knobs=knobs, output_dir=tmp_path / str(noise))
        trainer.train()
        first, second = [row for row in rewards if row[0] == guard.rollbacks[0].checkpoint.step + 1]
        assert (first == second) == (not noise)


def test_factors_do_not_add_up(make_trainer):
    """After two rollbacks 0.25 of the original, whichever attempt the checkpoint was saved in."""
    guard = KLGuardCallback(action="rollback", grace=0)
    troubles = [range(8, 11), range(14, 17)]

    def shown(step):
        attempt = len(guard.rollbacks)
        return 1000.0 if attempt < 2 and step in troubles[attempt] else 0.01

    trainer = make_trainer([SetKL(shown), guard], **{**SAVING, "max_steps": 20})
    guard.attach(trainer)
    trainer.train()
    first, second = guard.rollbacks
    assert second.checkpoint.attempt == 1
    assert second.checkpoint.step > first.checkpoint.step
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.25e-4)
    assert trainer.beta == pytest.approx(0.4)
    assert not guard.halted


def test_a_function_in_its_place(make_trainer, tmp_path):
    """`on_rollback` gets what it needs, and what it does by the context's methods is journaled."""
    seen = []

    def change(context):
        seen.append(context)
        context.scale_learning_rate(0.1)
        context.scale_learning_rate(0.3)

    _, trainer = guarded(make_trainer, on_rollback=change)
    trainer.train()
    (context,) = seen
    assert context.attempt == 1
    assert context.reason.signature == "KL_BLOWUP"
    assert context.trainer is trainer
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.3e-4)
    assert trainer.beta == pytest.approx(0.1)
    records, _ = read_journal(tmp_path / "run" / "kl_guard" / "journal.jsonl")
    (change_record,) = [r for r in records if r["type"] == "change"]
    assert change_record == {"type": "change", "attempt": 1, "learning_rate": 0.3, "beta": 1.0}


def test_a_function_that_raises(make_trainer, caplog):
    """What is configured is changed instead; a replay without any change would fail again."""

    def change(context):
        raise KeyError("mine")

    guard, trainer = guarded(make_trainer, on_rollback=change)
    trainer.train()
    assert not guard.halted
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.5e-4)
    assert "on_rollback raised" in caplog.text


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "x", True])
def test_bad_factors_are_refused(make_trainer, value, caplog):
    """In the configuration at once; from a function with the value, and then the configured ones hold."""
    with pytest.raises((TypeError, ValueError), match="lr_factor must be a finite number above 0"):
        KLGuardCallback(lr_factor=value)
    _, trainer = guarded(make_trainer, on_rollback=lambda context: context.scale_learning_rate(value))
    trainer.train()
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.5e-4)
    assert "factor must be a finite number above 0" in caplog.text


class Tracker(TrainerCallback):
    """Opens a run at the beginning and closes it at the end, as trackers do."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


@pytest.mark.parametrize("first", [True, False])
def test_trackers_see_one_end(make_trainer, first):
    """Wherever they stand in the list, they are not closed between attempts."""
    tracker = Tracker()
    guard = KLGuardCallback(action="rollback")
    shown = SetKL(lambda step: 1000.0 if step >= 8 and not guard.rollbacks else 0.01)
    callbacks = [shown, tracker, guard] if first else [shown, guard, tracker]
    trainer = make_trainer(callbacks, **SAVING)
    guard.attach(trainer)
    trainer.train()
    assert tracker.events == ["begin", "begin", "end"]


def test_what_lies_in_the_folder_afterwards(make_trainer, tmp_path):
    """Later checkpoints moved aside, the target where the trainer looks for it, nothing deleted."""
    events = Events()
    guard, trainer = guarded(make_trainer, events, save_total_limit=1)
    seen = {}

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if guard.rollbacks and not seen:
                seen["there"] = sorted(p.name for p in Path(args.output_dir).glob("checkpoint-*"))

    trainer.add_callback(Look())
    trainer.train()
    target = guard.rollbacks[0].checkpoint.step
    assert target == 4
    assert seen["there"] == ["checkpoint-4"]
    aside = tmp_path / "run" / "kl_guard" / "quarantine"
    assert (aside / "attempt-0-checkpoint-8").is_dir()
    assert (aside / "attempt-0-pin-6").is_dir()
    assert not (tmp_path / "run" / "kl_guard" / "start").exists()
    assert trainer.args.output_dir == str(tmp_path / "run")


def test_the_start_can_be_gone_back_to(make_trainer, tmp_path):
    """Trouble before the first checkpoint; a run without any rollback has the pin too, and nothing else changes."""
    guard, trainer = guarded(make_trainer, save_strategy="no")
    trainer.train()
    assert guard.rollbacks[0].checkpoint.step == 0
    assert trainer.state.global_step == 14
    off, trainer = guarded(make_trainer, knobs={"pin_start": False}, save_strategy="no", output_dir=tmp_path / "off")
    trainer.train()
    assert off.halted
    assert "there is no checkpoint from before the departure" in off.decision.note


def test_saving_the_start_changes_nothing(make_trainer, tmp_path):
    """A healthy run with the guard attached is the run without it, bit for bit."""
    states = []
    for name in ("with", "without"):
        record = Record()
        callbacks = [record] if name == "without" else [record, KLGuardCallback(action="rollback")]
        trainer = make_trainer(callbacks, output_dir=tmp_path / name, **SAVING)
        record.trainer = trainer
        if name == "with":
            callbacks[1].attach(trainer)
        trainer.train()
        states.append(record.states)
    assert states[0] == states[1]


def test_a_cause_that_comes_back_halts(make_trainer, caplog):
    """The same step fails again in spite of the changes: data, schedule or code; said so, after one rollback."""
    guard = KLGuardCallback(action="rollback", max_rollbacks=5)
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step >= 12 else 0.01), guard], **{**SAVING, "max_steps": 30})
    guard.attach(trainer)
    trainer.train()
    assert len(guard.rollbacks) == 1
    assert guard.halted
    assert trainer.state.global_step < 30
    assert "it had failed before, and it did so again in spite of the rollback" in guard.decision.note
    assert guard.decision.note in caplog.text


def test_a_nan_that_comes_back_halts(make_trainer):
    """A batch that breaks the loss does so again from the same data: one rollback, then a halt that says so."""
    nan = [SetKL(lambda step: math.nan if step == 9 else None, key) for key in ("kl", "grad_norm", "loss")]
    guard = KLGuardCallback(action="rollback", max_rollbacks=9)
    trainer = make_trainer([*nan, guard], **{**SAVING, "max_steps": 30})
    guard.attach(trainer)
    trainer.train()
    assert len(guard.rollbacks) == 1
    assert trainer.state.global_step == 9
    assert guard.decision.reason.signature == "KL_NONFINITE"
    assert "at step 9 it had failed before" in guard.decision.note


def test_the_budget_ends_in_a_halt(make_trainer):
    """Trouble that moves on each time: as many rollbacks as allowed, then a halt that says so; it never loops."""
    guard = KLGuardCallback(action="rollback", max_rollbacks=2, grace=0)

    def shown(step):
        return 1000.0 if step >= 10 + 10 * len(guard.rollbacks) else 0.01

    trainer = make_trainer([SetKL(shown), guard], **{**SAVING, "max_steps": 60})
    guard.attach(trainer)
    trainer.train()
    assert len(guard.rollbacks) == 2
    assert guard.halted
    assert "all 2 rollbacks are used up" in guard.decision.note


def test_raise_after_the_budget(make_trainer):
    """`on_halt="raise"` raises out of the one train() of the user, not between attempts."""
    guard = KLGuardCallback(action="rollback", on_halt="raise")
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step >= 12 else 0.01), guard], **{**SAVING, "max_steps": 30})
    guard.attach(trainer)
    with pytest.raises(KLGuardHalted, match="KL_BLOWUP"):
        trainer.train()
    assert len(guard.rollbacks) == 1


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


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
def test_damaged_checkpoints_are_passed_over(make_trainer, tmp_path, caplog, damage):
    """The pin of the target and its original are spoiled: the one before is gone back to, and the file is named."""
    guard, trainer = guarded(make_trainer, knobs=AS_IT_WAS)

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


@pytest.mark.parametrize("resume", ["True", "newest", "target", "another"])
def test_a_process_killed_after_the_decision_goes_back_when_started_again(make_trainer, tmp_path, resume):
    """Decided, not made: True, or the newest by its path, leads to the target; another is the user's own decision."""
    guard, trainer = guarded(make_trainer, trouble=9)

    class DiesError(Exception):
        pass

    def dies(*_):
        raise DiesError

    guard._reentry._make_ready = dies
    with pytest.raises(DiesError):
        trainer.train()
    assert (tmp_path / "run" / "checkpoint-10").is_dir()
    again, trainer = guarded(make_trainer, trouble=99)
    folder = str(tmp_path / "run" / "checkpoint-")
    paths = {"True": True, "newest": folder + "10", "target": folder + "4", "another": folder + "8"}
    trainer.train(resume_from_checkpoint=paths[resume])
    assert again.guard.attempt == (0 if resume == "another" else 1)
    if resume == "another":
        return
    assert trainer.state.global_step == 14
    rates = {row["step"]: row["learning_rate"] for row in training_logs(trainer)}
    assert rates[4] == pytest.approx(1e-4)
    assert rates[5] == rates[14] == pytest.approx(0.5e-4)
    assert trainer.beta == pytest.approx(0.2)
    assert (tmp_path / "run" / "kl_guard" / "quarantine" / "attempt-0-checkpoint-10").is_dir()


@pytest.mark.parametrize(("stop", "factors"), [(7, {7: 0.5, 14: 0.5}), (11, {7: 0.5, 11: 0.5, 14: 0.5})])
def test_a_process_killed_in_a_later_attempt_goes_on_in_it(make_trainer, tmp_path, stop, factors):
    """Before the first checkpoint of the new attempt, and after: same attempt, budget, factors, and beta."""
    guard, trainer = guarded(make_trainer)

    class Preempted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if guard.rollbacks and state.global_step == stop:
                raise KeyboardInterrupt

    trainer.add_callback(Preempted())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    run_id = guard.guard.run_id
    guard.guard.close()
    again = KLGuardCallback(action="rollback", max_rollbacks=1)
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step > 14 else 0.01), again], **{**SAVING, "max_steps": 24})
    again.attach(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert again.guard.run_id == run_id
    assert again.guard.attempt == 1
    rates = {row["step"]: row["learning_rate"] for row in training_logs(trainer)}
    for step, factor in factors.items():
        assert rates[step] == pytest.approx(1e-4 * factor), step
    assert trainer.beta == pytest.approx(0.2)
    assert again.halted
    assert "all 1 rollbacks are used up" in again.decision.note
    records, _ = read_journal(tmp_path / "run" / "kl_guard" / "journal.jsonl")
    assert recall(records).rollbacks == 1


def test_resuming_by_hand_moves_later_checkpoints_aside(make_trainer, tmp_path):
    """Saving the same steps again must not write into what is pinned, and "the last one" must be of this branch."""
    _, trainer = guarded(make_trainer, attach=False)
    trainer.train()
    before = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*"))
    assert before == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    shutil.copytree(tmp_path / "run" / "checkpoint-8", tmp_path / "copy")
    _, trainer = guarded(make_trainer, attach=False, trouble=99)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    aside = tmp_path / "run" / "kl_guard" / "quarantine" / "attempt-0-checkpoint-8"
    assert (aside / "model.safetensors").read_bytes() == (tmp_path / "copy" / "model.safetensors").read_bytes()


def test_logged_completions_are_kept(make_trainer, tmp_path):
    """The steps made again write theirs over the evidence; so it is moved aside first."""
    guard, trainer = guarded(make_trainer, log_completions=True)
    trainer.train()
    target, alarm = guard.rollbacks[0].checkpoint.step, guard.rollbacks[0].reason.step
    aside = tmp_path / "run" / "kl_guard" / "quarantine" / "attempt-0-completions"
    kept = {int(p.stem.split("_")[1]) for p in aside.glob("*.parquet")}
    assert kept == set(range(target + 1, alarm + 1))


def test_the_best_model_is_neither_loaded_nor_the_reason_to_delete(make_trainer, tmp_path):
    """Between attempts `load_best_model_at_end` must not clean up with save_total_limit=1."""
    from tiny_task import build_dataset

    guard, trainer = guarded(
        make_trainer,
        knobs=AS_IT_WAS,
        trouble=9,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        save_total_limit=1,
        eval_dataset=build_dataset(8),
    )
    trainer.train()
    assert trainer.state.global_step == 14
    assert not guard.halted
    assert len(guard.rollbacks) == 1


def test_the_journal_tells_the_whole_story(make_trainer, tmp_path):
    """Decision, rollback and change, in this order; observations keep their attempt."""
    _, trainer = guarded(make_trainer)
    trainer.train()
    records, notes = read_journal(tmp_path / "run" / "kl_guard" / "journal.jsonl")
    assert not notes
    kinds = [r["type"] for r in records if r["type"] in {"decision", "rollback", "change", "resume"}]
    assert kinds == ["decision", "rollback", "change"]
    assert {r["attempt"] for r in records if r["type"] == "observation"} == {0, 1}
    memory = recall(records)
    assert list(memory.history.steps) == list(range(1, 15))
    assert (memory.attempt, memory.rollbacks) == (1, 1)
    incident = json.loads(next((tmp_path / "run" / "kl_guard").glob("incidents/*/incident.json")).read_text())
    assert incident["action"] == "rollback"


def test_a_second_train_call_begins_anew(make_trainer):
    """Attached once, a trainer can train again: fresh budget, no memory, and the settings it was started with."""
    guard, trainer = guarded(make_trainer)
    trainer.train()
    first = guard.guard.run_id
    assert len(guard.rollbacks) == 1
    shown = next(c for c in trainer.callback_handler.callbacks if isinstance(c, SetKL))
    shown.values = lambda step: 0.01
    trainer.train()
    assert guard.guard.run_id != first
    assert not guard.halted
    assert guard.rollbacks == []
    assert trainer.beta == pytest.approx(0.1)
    assert training_logs(trainer)[0]["learning_rate"] == pytest.approx(1e-4)


def test_the_halted_state_of_a_later_attempt_can_be_resumed(make_trainer, tmp_path):
    """It holds the learning rate of its attempt; beta is put back."""
    guard = KLGuardCallback(action="rollback")
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step >= 12 else 0.01), guard], **{**SAVING, "max_steps": 30})
    guard.attach(trainer)
    trainer.train()
    assert guard.halted
    assert guard.guard.attempt == 1
    (state,) = (tmp_path / "run" / "kl_guard" / "halted").glob("step-*")
    again, trainer = guarded(make_trainer, trouble=99, max_steps=20)
    trainer.train(resume_from_checkpoint=str(state))
    assert trainer.state.global_step == 20
    assert not again.halted
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.5e-4)
    assert trainer.beta == pytest.approx(0.2)


def test_checkpoints_of_an_older_run_do_not_count(make_trainer, tmp_path):
    """They lie in the same folder; their history is another one, so they are neither pinned nor gone back to."""
    make_trainer([], **{**SAVING, "save_steps": 3, "seed": 5}).train()
    first, trainer = guarded(make_trainer, trouble=99, save_steps=4, max_steps=8)
    trainer.train()
    first.guard.close()
    again, trainer = guarded(make_trainer, trouble=99, save_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-8"))
    assert [c.step for c in again.guard.checkpoints] == [0, 4, 8, 12, 14]
    assert not (tmp_path / "run" / "kl_guard" / "pins" / "step-6").exists()
