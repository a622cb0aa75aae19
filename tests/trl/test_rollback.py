"""Going back by itself: the same as a resume by hand, with what is changed, once, and never for ever."""

import json
import logging
import math
from pathlib import Path

import pytest
from transformers import TrainerCallback

from kl_guard import KLGuardHalted
from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard_trl import KLGuardCallback
from rollback_runs import SAVING, Tracker, guarded, said
from trl_runs import Events, SetKL, training_logs
from trl_state import Record

AS_IT_WAS = {"lr_factor": 1.0, "beta_factor": 1.0, "new_noise": False}


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


ON_NEWEST_ONLY = {"iterations", "both", "start", "rloo generations"}  # the others have their parts


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[pytest.mark.newest] if name in ON_NEWEST_ONLY else [])
        for name, settings in SETTINGS.items()
    ],
)
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


@pytest.mark.newest
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


@pytest.mark.newest
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


@pytest.mark.newest
@pytest.mark.parametrize("how", ["raises", "trains"])
def test_a_function_that_fails(make_trainer, caplog, how):
    """What is configured is changed instead; a replay without any change would fail again."""

    def change(context):
        if how == "trains":
            context.trainer.train()
        raise KeyError("mine")

    guard, trainer = guarded(make_trainer, on_rollback=change)
    trainer.train()
    assert not guard.halted
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.5e-4)
    assert "on_rollback raised" in caplog.text


@pytest.mark.newest
def test_bad_factors_are_refused(make_trainer, caplog):
    """In the configuration at once; from a function with the value, and then the configured ones hold."""
    refused = []

    def change(context):
        for value in (0, -1, math.inf, math.nan, "x", True):
            with pytest.raises((TypeError, ValueError), match="lr_factor must be a finite number above 0"):
                KLGuardCallback(lr_factor=value)
            with pytest.raises((TypeError, ValueError), match="factor must be a finite number above 0"):
                context.scale_learning_rate(value)
            refused.append(value)
        context.scale_learning_rate(0)

    _, trainer = guarded(make_trainer, on_rollback=change)
    trainer.train()
    assert len(refused) == 6
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.5e-4)
    assert "factor must be a finite number above 0" in caplog.text


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


@pytest.mark.newest
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


@pytest.mark.newest
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


@pytest.mark.newest
def test_raise_after_the_budget(make_trainer):
    """`on_halt="raise"` raises out of the one train() of the user, not between attempts."""
    guard = KLGuardCallback(action="rollback", on_halt="raise")
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step >= 12 else 0.01), guard], **{**SAVING, "max_steps": 30})
    guard.attach(trainer)
    with pytest.raises(KLGuardHalted, match="KL_BLOWUP"):
        trainer.train()
    assert len(guard.rollbacks) == 1


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


@pytest.mark.newest
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
