"""A halt stops the real trainer at once, spoils no checkpoint, and keeps the state."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from kl_guard import KLGuardHalted
from kl_guard_torch.room import bytes_of
from kl_guard_trl import KLGuardCallback
from tiny_task import LearningRateJump, build_dataset
from trl_runs import Events, SetKL, training_logs


def explode(step):
    """KL in the log: sound for five steps, then above the hard ceiling."""
    return None if step <= 5 else 1000.0 + step


EVALUATES = {"per_device_eval_batch_size": 8, "eval_strategy": "steps"}
KEEPS_THE_BEST = {
    "save_strategy": "steps",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}


def checkpoints(folder):
    return sorted(int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*"))


def test_a_real_blow_up_is_halted(make_trainer, tmp_path, caplog):
    """GRPO, learning rate x100 at step 45: halted within 16 steps, departure near the cause, way back named."""
    guard, events = KLGuardCallback(), Events()
    trainer = make_trainer(
        [LearningRateJump(45, 100.0), guard, events], max_steps=90, save_strategy="steps", save_steps=10
    )
    trainer.train()
    reason = guard.decision.reason
    assert guard.halted
    assert trainer.state.global_step == events.steps == reason.step <= 61
    assert reason.signature == "KL_BLOWUP"
    assert abs(reason.departure_step - 45) <= 5
    assert guard.decision.checkpoint.path == str(tmp_path / "run" / "kl_guard" / "pins" / "step-40")
    assert reason.causes[0].name == "the learning rate was raised"
    text = caplog.text
    for part in (
        "KL_BLOWUP (critical)",
        "onset: step",
        "departure",
        "x100",
        "try: ",
        "trainer.train(resume_from_checkp",
    ):
        assert part in text
    (incident,) = (tmp_path / "run" / "kl_guard" / "incidents").iterdir()
    assert json.loads((incident / "incident.json").read_text())["checkpoint"]["step"] == 40


def test_a_real_blow_up_under_rloo_is_seen(make_trainer):
    """RLOO logs k1, which is noisy and can be negative; the same rule holds."""
    guard = KLGuardCallback(abs_floor=0.25)
    trainer = make_trainer([LearningRateJump(45, 100.0), guard], kind="rloo", max_steps=90)
    trainer.train()
    assert guard.config.kl_kind == "k1"
    assert guard.halted
    assert 45 <= guard.decision.reason.step <= 70


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_healthy_run_passes_in_silence(make_trainer, kind):
    """No finding, no halt, and every step trained."""
    guard = KLGuardCallback()
    trainer = make_trainer([guard], kind=kind, max_steps=60)
    trainer.train()
    assert not guard.halted
    assert guard.guard.findings == []
    assert trainer.state.global_step == 60


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_save_and_evaluation_due_are_called_off(make_trainer, tmp_path, kind):
    """With a save and an evaluation due at every step and one checkpoint kept, the last sound ones stay."""
    guard, events = KLGuardCallback(), Events()
    trainer = make_trainer(
        [SetKL(explode), guard, events],
        kind=kind,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
        eval_dataset=build_dataset(8),
    )
    trainer.train()
    assert trainer.state.global_step == 8
    assert events.evaluations == 7
    assert checkpoints(tmp_path / "run") == [7]


def test_the_halted_state_is_kept(make_trainer, tmp_path):
    """Complete, under the guard's own folder, equal to the model in memory; the arguments are put back."""
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(explode), guard], log_completions=True, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "run" / "kl_guard" / "halted" / "step-8"
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= {
        p.name for p in folder.iterdir()
    }
    saved = load_file(folder / "model.safetensors")
    for name, tensor in trainer.model.state_dict().items():
        if name in saved:
            assert torch.equal(saved[name], tensor.cpu()), name
    assert trainer.args.output_dir == str(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [2, 4, 6]
    written = sorted(p.name for p in (tmp_path / "run" / "completions").iterdir())
    assert written[-1].endswith("00008.parquet")


def test_a_second_halt_at_the_same_step_keeps_both_states(make_trainer, tmp_path):
    """Nothing the guard kept is overwritten."""
    for _ in range(2):
        make_trainer([SetKL(explode), KLGuardCallback()]).train()
    halted = tmp_path / "run" / "kl_guard" / "halted"
    assert sorted(p.name for p in halted.glob("step-*")) == ["step-8", "step-8-2"]


def test_the_size_of_a_checkpoint_is_estimated(make_trainer):
    """Weights and two moments of what is trained; with PEFT the frozen base is not saved."""
    model = make_trainer([]).model
    count = sum(p.numel() for p in model.parameters())
    assert bytes_of(model) == count * (4 + 8)
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert bytes_of(model) == count * 4
    model.peft_config = {}
    assert bytes_of(model) == 0


@pytest.mark.parametrize("obstacle", ["off", "space", "folder"])
def test_without_space_the_state_is_not_kept(make_trainer, tmp_path, caplog, monkeypatch, obstacle):
    """Switched off, no space, or a folder that cannot be made: the halt comes all the same, and it is said."""
    guard = KLGuardCallback(save_halted=obstacle != "off")
    trainer = make_trainer([SetKL(explode), guard], save_strategy="steps", save_steps=1)
    if obstacle == "space":
        usage = type("Usage", (), {"free": 10})()
        monkeypatch.setattr("kl_guard_torch.room.shutil.disk_usage", lambda _: usage)
    if obstacle == "folder":
        (tmp_path / "run" / "kl_guard").mkdir(parents=True)
        (tmp_path / "run" / "kl_guard" / "halted").write_text("in the way")
    trainer.train()
    assert trainer.state.global_step == 8
    assert checkpoints(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7]
    assert not list((tmp_path / "run" / "kl_guard").glob("halted/step-*"))
    assert ("not kept" in caplog.text) == (obstacle != "off")


def test_raise_comes_after_clean_up(make_trainer, tmp_path):
    """train() raises, with the decision; the state is kept, the journal closed, and training can go on."""
    guard = KLGuardCallback(on_halt="raise")
    trainer = make_trainer([SetKL(explode), guard])
    with pytest.raises(KLGuardHalted, match="KL_BLOWUP at step 8") as caught:
        trainer.train()
    assert caught.value.decision.reason.step == 8
    assert (tmp_path / "run" / "kl_guard" / "halted" / "step-8").is_dir()
    again = make_trainer([KLGuardCallback()])
    again.train()
    assert again.state.global_step == 12


def test_warn_only_goes_on(make_trainer, tmp_path):
    """`action="warn"` reports and never stops."""
    guard = KLGuardCallback(action="warn")
    trainer = make_trainer([SetKL(explode), guard])
    trainer.train()
    assert not guard.halted
    assert trainer.state.global_step == 12
    assert [f.signature for f in guard.guard.findings] == ["KL_BLOWUP"]


def test_epoch_strategies(make_trainer, tmp_path):
    """What is due at the end of the epoch that the halt cuts short is called off as well."""
    guard, events = KLGuardCallback(), Events()
    trainer = make_trainer(
        [SetKL(explode), guard, events],
        max_steps=-1,
        num_train_epochs=2,
        save_strategy="epoch",
        eval_strategy="epoch",
        per_device_eval_batch_size=8,
        eval_dataset=build_dataset(8),
    )
    trainer.train()
    assert trainer.state.global_step == 8
    assert events.evaluations == 0
    assert checkpoints(tmp_path / "run") == []
    assert (tmp_path / "run" / "kl_guard" / "halted" / "step-8").is_dir()


def test_the_best_checkpoint_is_not_lost(make_trainer, tmp_path):
    """With one checkpoint kept, the trainer must not take the halted state for the best and delete the others."""
    guard = KLGuardCallback()
    trainer = make_trainer(
        [SetKL(explode), guard],
        kind="rloo",
        save_steps=2,
        eval_steps=2,
        eval_dataset=build_dataset(8),
        **EVALUATES,
        **KEEPS_THE_BEST,
    )
    trainer.train()
    assert guard.halted
    assert set(checkpoints(tmp_path / "run")) & {2, 4, 6}
    assert "halted" not in str(trainer.state.best_model_checkpoint)


def test_nonfinite_steps_are_halted(make_trainer):
    """All-NaN KL, which TRL logs as None, with a NaN gradient."""
    guard = KLGuardCallback()

    class Broken(SetKL):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs and state.global_step == 6:
                logs |= {"kl": None, "grad_norm": float("nan")}

    trainer = make_trainer([Broken(None), guard])
    trainer.train()
    assert guard.decision.reason.signature == "KL_NONFINITE"
    assert trainer.state.global_step == 6


def test_a_halt_with_averaged_logs(make_trainer):
    """With logging_steps 3 the guard decides at a logged step, and knows what the log averages."""
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(lambda step: 1000.0), guard], max_steps=20, logging_steps=3)
    trainer.train()
    assert trainer.state.global_step == 9
    assert [o.window for o in guard.guard.history] == [3, 3, 3]
    assert [o.step for o in guard.guard.history] == [3, 6, 9]


def test_what_is_observed_is_what_was_logged(make_trainer):
    """KL and companions of every training log, and nothing else: no evaluation, no summary."""
    guard = KLGuardCallback()
    trainer = make_trainer(
        [guard], eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=8, eval_dataset=build_dataset(8)
    )
    trainer.train()
    rows = training_logs(trainer)
    assert [o.step for o in guard.guard.history] == [row["step"] for row in rows] == list(range(1, 13))
    for observation, row in zip(guard.guard.history, rows, strict=True):
        assert observation.kl_mean == row["kl"]
        assert observation.grad_norm == row["grad_norm"]
        assert observation.reward == row["reward"]
        assert observation.beta == 0.1


def test_the_guard_changes_nothing(make_trainer, tmp_path):
    """A guarded run logs the very numbers of an unguarded one."""
    plain = make_trainer([], output_dir=tmp_path / "plain")
    plain.train()
    guarded = make_trainer([KLGuardCallback()], output_dir=tmp_path / "guarded")
    guarded.train()
    for a, b in zip(training_logs(plain), training_logs(guarded), strict=True):
        assert {k: v for k, v in a.items() if "time" not in k} == {k: v for k, v in b.items() if "time" not in k}


def test_findings_are_logged_at_their_level(make_trainer, caplog):
    """Critical as ERROR, so that every log filter shows it."""
    make_trainer([SetKL(explode), KLGuardCallback()]).train()
    levels = {r.levelno for r in caplog.records if "KL_BLOWUP (critical)" in r.getMessage()}
    assert levels == {logging.ERROR}


def test_the_way_back_survives_rotation(make_trainer, tmp_path, caplog):
    """One checkpoint kept, saved every five steps: rotation takes the good ones, their pins stay, and one resumes."""
    guard = KLGuardCallback()
    arguments = {"max_steps": 90, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 1}
    trainer = make_trainer([LearningRateJump(45, 100.0), guard], **arguments)
    trainer.train()
    back = guard.decision.checkpoint
    assert back.step < guard.decision.reason.departure_step - 1
    assert back.path == str(tmp_path / "run" / "kl_guard" / "pins" / f"step-{back.step}")
    assert checkpoints(tmp_path / "run") == [50]
    assert f"trainer.train(resume_from_checkpoint='{back.path}')" in caplog.text
    again = make_trainer([KLGuardCallback()], **{**arguments, "max_steps": back.step + 5})
    again.train(resume_from_checkpoint=back.path)
    assert again.state.global_step == back.step + 5


def test_without_pins_rotation_has_its_way(make_trainer, tmp_path):
    """`pin_checkpoints=False`: no copies, and no way back is named that does not exist."""
    guard = KLGuardCallback(pin_checkpoints=False)
    make_trainer([SetKL(explode), guard], max_steps=12, save_strategy="steps", save_steps=5, save_total_limit=1).train()
    assert not (tmp_path / "run" / "kl_guard" / "pins").exists()
    assert guard.decision.checkpoint is None


@pytest.mark.parametrize(
    ("accumulation", "generation", "iterations", "aligned"),
    [(1, 1, 1, [1, 2, 3, 4]), (1, 2, 1, [2, 4]), (2, 4, 1, [2, 4]), (1, 2, 2, [4])],
)
def test_generation_boundaries(make_trainer, tmp_path, accumulation, generation, iterations, aligned):
    """A pin says whether its checkpoint lies between two generations."""
    guard = KLGuardCallback()
    make_trainer(
        [guard],
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=generation,
        num_iterations=iterations,
    ).train()
    pins = tmp_path / "run" / "kl_guard" / "pins"
    found = {int(p.name[5:]): json.loads((p / "kl_guard_manifest.json").read_text())["aligned"] for p in pins.iterdir()}
    assert found
    assert all(found[step] == (step in aligned) for step in found)


class Uploader(TrainerCallback):
    """Looks for a checkpoint where the trainer puts it, as callbacks do that upload it."""

    def __init__(self):
        self.found = []

    def on_save(self, args, state, control, **kwargs):
        self.found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "config.json").is_file())


def test_callbacks_after_the_guard_find_what_was_saved(make_trainer, tmp_path):
    """The halted state is put in its place only when every callback has seen the save."""
    uploader = Uploader()
    trainer = make_trainer([SetKL(explode), KLGuardCallback(), uploader], save_strategy="steps", save_steps=3)
    trainer.train()
    assert uploader.found == [True, True, True]  # steps 3 and 6, and the halted state
    assert (tmp_path / "run" / "kl_guard" / "halted" / "step-8" / "config.json").is_file()
    assert trainer.args.output_dir == str(tmp_path / "run")


def test_the_checkpoint_named_outlives_training(make_trainer, tmp_path):
    """Clean-up at the end of training deletes all but the best; what the guard names is still there."""
    guard = KLGuardCallback()
    trainer = make_trainer(
        [SetKL(explode), guard],
        save_steps=1,
        eval_steps=1,
        eval_dataset=build_dataset(8),
        **EVALUATES,
        **KEEPS_THE_BEST,
    )
    trainer.train()
    assert (Path(guard.decision.checkpoint.path) / "trainer_state.json").is_file()


def test_a_log_of_the_user_does_not_count_as_the_trainers(make_trainer):
    """A callback that logs by itself, and one that asks for a log twice in a step."""

    class Chatty(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_log = True

        def on_evaluate(self, args, state, control, **kwargs):
            trainer.log({"loss": 1.0, "kl": 0.01})

    guard = KLGuardCallback()
    trainer = make_trainer(
        [Chatty(), guard],
        max_steps=40,
        eval_strategy="epoch",
        per_device_eval_batch_size=8,
        eval_dataset=build_dataset(8),
    )
    trainer.train()
    assert [o.step for o in guard.guard.history] == list(range(1, 41))
    assert not guard._log_due
