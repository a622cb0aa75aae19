"""What is said at the start, what is refused, and that no fault of the guard reaches the trainer."""

import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerControl, TrainerState

import trl
from kl_guard import GuardConfig, KLGuard
from kl_guard_trl import KLGuardCallback
from kl_guard_trl.halted_state import HaltedState
from kl_guard_trl.hosts import kl_kind_of
from tiny_task import GRPO, build_model, build_tokenizer, prompts
from trl import GRPOConfig, KTOConfig, RLOOConfig, SFTConfig, SFTTrainer, TrlParser
from trl_runs import Events, SetKL, training_logs


def said(caplog):
    """What the guard logged, one string per line."""
    return [r.getMessage() for r in caplog.records if r.name == "kl_guard"]


def test_the_version_under_test():
    """`make test` runs these tests on both ends of the supported range."""
    expected = os.environ.get("KL_GUARD_EXPECT_TRL")
    assert expected is None or trl.__version__ == expected


LIMITS = {
    "beta 0": ({"beta": 0.0}, "beta is 0: there is no reference model"),
    "averaged logs": ({"logging_steps": 4}, "logging_steps is 4: an observation averages 4 steps"),
    "ratio of steps": ({"logging_steps": 0.25}, "logging_steps is 3: an observation averages 3 steps"),
    "first step": ({}, "KL_BLOWUP cannot fire before step 12"),
    "first averaged step": ({"logging_steps": 2}, "KL_BLOWUP cannot fire before step 24"),
    "too short": ({"max_steps": 6}, "this run will give only 6 observations, so KL_BLOWUP cannot fire at all"),
    "micro-batches": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2: a step averages 2"),
    "no saves": ({"save_strategy": "no"}, "save_strategy is 'no'"),
    "one checkpoint": (
        {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
        "save_total_limit is 1 with save_steps 2",
    ),
    "late saves": ({"save_strategy": "steps", "save_steps": 500}, "save_steps is 500 of 12 steps"),
    "one epoch kept": ({"save_strategy": "epoch", "save_total_limit": 1}, "save_total_limit is 1: the only"),
    "NaN filter": ({}, "logging_nan_inf_filter is on"),
    "nothing logged": ({"logging_strategy": "no"}, "logging_strategy is 'no'"),
}


@pytest.mark.newest
@pytest.mark.parametrize(("arguments", "line"), LIMITS.values(), ids=LIMITS.keys())
def test_limits_are_said_at_the_start(make_trainer, caplog, arguments, line):
    """One line each, on a real trainer."""
    make_trainer([KLGuardCallback()], **{"max_steps": 12, **arguments}).train()
    assert len([text for text in said(caplog) if line in text]) == 1


def test_nothing_is_said_that_does_not_limit(make_trainer, caplog):
    """A run that saves enough, logs each step and filters nothing hears only from where levels can fire."""
    make_trainer(
        [KLGuardCallback()], save_strategy="steps", save_steps=2, save_total_limit=40, logging_nan_inf_filter=False
    ).train()
    assert len(said(caplog)) == 1
    assert "cannot fire before" in said(caplog)[0]


def test_pushing_after_a_halt_is_warned_of(make_trainer, caplog):
    """A script that pushes after train() would publish the diverged model."""
    trainer = make_trainer([KLGuardCallback()])
    trainer.args.push_to_hub = True
    guard = KLGuardCallback()
    guard.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert [t for t in said(caplog) if "push_to_hub is on" in t]
    kept = HaltedState(trainer.args, trainer.state)
    kept.redirect()
    assert trainer.args.push_to_hub is False
    kept.restore()
    assert trainer.args.push_to_hub is True


@pytest.mark.parametrize(
    ("config", "kind"), [(GRPOConfig, "k3"), (RLOOConfig, "k1"), (KTOConfig, None), (SFTConfig, "k3")]
)
def test_kinds_of_kl(tmp_path, config, kind):
    """What `kl` in the logs is depends on the trainer; KTO's is another quantity."""
    assert kl_kind_of(config(output_dir=str(tmp_path), use_cpu=True, bf16=False)) == kind


def test_a_run_without_kl_goes_on(make_trainer, caplog):
    """Beta 0: said at the start, KL_MISSING in the journal, never a halt."""
    guard = KLGuardCallback()
    trainer = make_trainer([guard], beta=0.0, max_steps=25)
    trainer.train()
    assert trainer.state.global_step == 25
    assert [(f.signature, f.severity.value) for f in guard.guard.findings] == [
        ("KL_MISSING", "info"),
        ("KL_MISSING", "warn"),
    ]


def test_a_trainer_that_knows_no_kl(tmp_path, caplog):
    """SFT: one line, and training as ever."""
    tokenizer = build_tokenizer()
    arguments = {k: v for k, v in GRPO.items() if k not in {"beta", "num_generations", "max_completion_length"}}
    trainer = SFTTrainer(
        model=build_model(tokenizer),
        args=SFTConfig(output_dir=str(tmp_path), max_steps=3, **arguments),
        train_dataset=Dataset.from_dict({"text": prompts(64)}),
        processing_class=tokenizer,
        callbacks=[KLGuardCallback()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert trainer.state.global_step == 3
    assert len([t for t in said(caplog) if "SFTConfig has no beta" in t]) == 1


def test_another_name_of_kl_is_pointed_out(make_trainer, caplog):
    """A log without `kl` but with something like it names that."""
    guard = KLGuardCallback()
    make_trainer([SetKL(lambda step: 7.0, key="objective/kl"), guard], beta=0.0, max_steps=3).train()
    assert len([t for t in said(caplog) if "'objective/kl'" in t]) == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_callback_added_twice(make_trainer, caplog, same):
    """One warning; one of them guards, and each step is observed once."""
    first = KLGuardCallback()
    second = first if same else KLGuardCallback()
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step > 5 else None), first, second])
    trainer.train()
    assert len([t for t in said(caplog) if "added" in t and "KLGuardCallback" in t]) == 1
    assert first.halted
    assert trainer.state.global_step == 8
    assert len(first.guard.history) == 8
    assert len([t for t in said(caplog) if "KL_BLOWUP (critical)" in t]) == 1


def test_another_quantity_is_not_watched(tmp_path, caplog):
    """KTO's `kl` is an estimate for its loss: said once, nothing observed, nothing halted."""
    guard = KLGuardCallback()
    args = KTOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    state, control = TrainerState(), TrainerControl()
    guard.on_train_begin(args, state, control)
    for step in range(1, 30):
        state.global_step, control.should_log = step, True
        guard.on_step_end(args, state, control)
        guard.on_log(args, state, control, logs={"loss": 0.1, "kl": 1e6})
    guard.on_train_end(args, state, control)
    assert not control.should_training_stop
    assert guard.guard is None
    assert len([t for t in said(caplog) if "is not watched" in t]) == 1


def test_two_trainers_each_with_a_guard(make_trainer, tmp_path, caplog):
    """Guards of different trainers in one process do not get in each other's way."""
    for name in ("a", "b"):
        guard = KLGuardCallback()
        make_trainer([guard], output_dir=tmp_path / name).train()
        assert len(guard.guard.history) == 12
    assert not [t for t in said(caplog) if "another guard" in t or "added" in t]


def test_training_twice_with_one_callback(make_trainer, tmp_path):
    """A second train() is a fresh run: new run id, new journal."""
    guard = KLGuardCallback()
    trainer = make_trainer([guard])
    trainer.train()
    first = guard.guard.run_id
    trainer.train()
    assert guard.guard.run_id != first
    assert len(guard.guard.history) == 12
    assert (tmp_path / "run" / "kl_guard" / f"journal-{first}.jsonl").is_file()


@pytest.mark.newest
@pytest.mark.parametrize(
    "values",
    [lambda step: "high", lambda step: [1.0, 2.0], lambda step: torch.ones(3), lambda step: object()],
    ids=["text", "list", "tensor", "object"],
)
def test_values_that_are_no_numbers(make_trainer, caplog, values):
    """Another callback spoils the log: one warning, KL counts as missing, training goes on."""
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(values), guard])
    trainer.train()
    assert trainer.state.global_step == 12
    assert len([t for t in said(caplog) if "kl_mean must be a number" in t]) == 1


@pytest.mark.newest
@pytest.mark.parametrize("value", [torch.tensor(1000.0), "1000.0", torch.tensor([1000.0], dtype=torch.bfloat16)])
def test_values_that_are_numbers_in_disguise(make_trainer, value):
    """Tensors and text halt like floats."""
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(lambda step: value), guard])
    trainer.train()
    assert trainer.state.global_step == 3


def test_options_are_refused_at_once():
    """Where the user sets them, not in the middle of a run."""
    with pytest.raises(TypeError, match="did you mean 'abs_floor'"):
        KLGuardCallback(abs_flor=0.1)
    with pytest.raises(ValueError, match="action must be one of"):
        KLGuardCallback(action="stop")
    with pytest.raises(TypeError, match="must be a GuardConfig"):
        KLGuardCallback({"ratio": 4})
    assert KLGuardCallback(GuardConfig(ratio=4.0), abs_floor=0.1).config == GuardConfig(ratio=4.0, abs_floor=0.1)


def test_every_knob_on_the_command_line(tmp_path):
    """TrlParser puts GRPO's and the guard's options side by side, and in YAML."""
    parser = TrlParser((GRPOConfig, GuardConfig))
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    grpo, guard = parser.parse_args_and_config([*arguments, "--abs_floor", "0.2", "--action", "warn", "--no_robust"])
    assert guard == GuardConfig(abs_floor=0.2, action="warn", robust=False)
    assert grpo.output_dir == str(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text("ratio: 4.0\nhorizon: run\n")
    _, guard = TrlParser((GRPOConfig, GuardConfig)).parse_args_and_config([*arguments, "--config", str(config)])
    assert guard == GuardConfig(ratio=4.0, horizon="run")


GUARD_METHODS = [name for name in dir(KLGuard) if callable(getattr(KLGuard, name)) and not name.startswith("__")]


def broken(*_, **__):
    """A fault."""
    raise ZeroDivisionError("inserted")


@pytest.mark.newest  # the guard's own parts are the same on every version
@pytest.mark.parametrize("name", ["__init__", "level", "suspicion", *GUARD_METHODS])
def test_a_fault_in_any_method_of_the_guard(make_trainer, tmp_path, monkeypatch, caplog, name):
    """Each method of KLGuard made to raise: the trainer finishes or halts, and is never disturbed."""
    monkeypatch.setattr(KLGuard, name, broken)
    events = Events()
    trainer = make_trainer(
        [SetKL(lambda step: 1000.0 if step > 5 else None), KLGuardCallback(), events],
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    assert 8 <= trainer.state.global_step <= 12  # a fault may cost it an observation, or all
    assert trainer.args.output_dir == str(tmp_path / "run")
    faults = [t for t in said(caplog) if "fault of the guard itself" in t]
    assert len(faults) == len(set(faults))


@pytest.mark.newest  # the guard's own parts are the same on every version
@pytest.mark.parametrize(
    "name",
    [
        "_start",
        "_observe",
        "_say_way_back",
        "_finish_keeping",
        "_note_checkpoint",
        "_keep_halted",
        "finish",
    ],
)
def test_a_fault_in_the_callback_itself(make_trainer, tmp_path, monkeypatch, caplog, name):
    """The same for the adapter's own parts; a stop that was agreed on is kept."""
    monkeypatch.setattr(KLGuardCallback, name, broken)
    trainer = make_trainer(
        [SetKL(lambda step: 1000.0 if step > 5 else None), KLGuardCallback()], save_strategy="steps", save_steps=2
    )
    trainer.train()
    assert trainer.state.global_step in {8, 12}
    assert trainer.args.output_dir == str(tmp_path / "run")


@pytest.mark.newest  # the guard's own parts are the same on every version
@pytest.mark.parametrize("part", ["why_not", "finish", "__init__"])
def test_a_fault_in_keeping_the_state(make_trainer, tmp_path, monkeypatch, part):
    """The halt stands; the arguments are put back at the latest when training ends."""
    monkeypatch.setattr(HaltedState, part, broken)
    trainer = make_trainer([SetKL(lambda step: 1000.0), KLGuardCallback()])
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.args.output_dir == str(tmp_path / "run")


def test_a_keyboard_interrupt_goes_through(make_trainer, monkeypatch):
    """Ctrl-C belongs to the user."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(KLGuard, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_trainer([KLGuardCallback()]).train()


@pytest.mark.newest
def test_without_trl_one_line_says_what_to_install(tmp_path):
    """The adapter names its extra; the error is of the import system's own kind."""
    (tmp_path / "trl.py").write_text("raise ModuleNotFoundError(\"No module named 'trl'\", name='trl')")
    code = "import sys; sys.path.insert(0, sys.argv[1])\nimport kl_guard\nimport kl_guard_trl"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: kl_guard_trl needs TRL, and trl is not installed. "
        "Install it with: pip install 'kl-guard[trl]'"
    )


def test_training_logs_are_where_the_tests_look(make_trainer):
    """The helper of these tests sees what the trainer logged."""
    trainer = make_trainer([], max_steps=2)
    trainer.train()
    assert [row["step"] for row in training_logs(trainer)] == [1, 2]


def test_a_halt_of_the_run_before_does_not_stop_the_next(make_trainer, monkeypatch):
    """Not even when the guard cannot begin: a fault there must not leave the old halt standing."""
    guard = KLGuardCallback()
    make_trainer([SetKL(lambda step: 1000.0), guard]).train()
    assert guard.halted
    monkeypatch.setattr(KLGuardCallback, "_start", broken)
    trainer = make_trainer([guard])
    trainer.train()
    assert trainer.state.global_step == 12
    assert not guard.halted
