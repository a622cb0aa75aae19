"""What the guard sees of tokens is what the trainer computes, in every step, and nothing is computed again."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from kl_guard.incidents import tokens_in
from kl_guard_trl import KLGuardCallback
from launch import launch
from tiny_task import build_tokenizer
from trl_runs import Events, SetKL, training_logs

FAST = {"learning_rate": 2e-3, "beta": 0.05, "max_steps": 8}


def attached(make_trainer, *callbacks, knobs=None, **arguments):
    """A trainer with an attached guard."""
    guard = KLGuardCallback(**(knobs or {}))
    trainer = make_trainer([*callbacks, guard], **{**FAST, **arguments})
    guard.attach(trainer)
    return guard, trainer


def kl_by_step(guard):
    """KL of each observation."""
    return dict(zip(guard.guard.history.steps, guard.guard.history.column("kl_mean"), strict=True))


SETTINGS = {
    "plain": {},
    "four micro-batches": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    "iterations": {"num_iterations": 2},
    "generations of four": {"steps_per_generation": 4},
    "bias correction": {"use_bias_correction_kl": True, "num_iterations": 2},
    "lora": {"lora": True, "learning_rate": 2e-2},
    "rloo": {"kind": "rloo"},
    "rloo, four micro-batches": {
        "kind": "rloo",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
    },
}


@pytest.mark.parametrize("arguments", SETTINGS.values(), ids=SETTINGS.keys())
def test_kl_mean_is_that_of_the_trainer(make_trainer, arguments):
    """To 1e-5, and the tokens tell the same: their own mean is near it."""
    guard, trainer = attached(make_trainer, **arguments)
    trainer.train()
    observed = kl_by_step(guard)
    logged = {row["step"]: row["kl"] for row in training_logs(trainer) if "kl" in row}
    assert len(logged) == 8
    for step, kl in logged.items():
        assert observed[step] == pytest.approx(kl, rel=1e-5, abs=1e-12), step
    lines = [json.loads(line) for line in (guard.guard.folder / "tokens.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    name = "k1_mean" if arguments.get("kind") == "rloo" else "kl_mean"
    if not {"num_iterations", "steps_per_generation"} & arguments.keys():  # else TRL weighs KL by importance
        for line in lines:
            assert line[name] == pytest.approx(logged[line["step"]], rel=0.1, abs=1e-4)
    last = lines[-1]
    assert last["outliers"][0]["kl"] == pytest.approx(last["kl_max"])
    assert last["tokens"] > 50


def test_rloo_between_generations(make_trainer):
    """RLOO logs a KL when it generates; the guard sees one in each step, with the policy of that step."""
    guard, trainer = attached(make_trainer, kind="rloo", steps_per_generation=4, gradient_accumulation_steps=1)
    trainer.train()
    observed = kl_by_step(guard)
    logged = {row["step"]: row["kl"] for row in training_logs(trainer) if "kl" in row}
    assert sorted(logged) == [1, 5]
    assert all(math.isfinite(observed[step]) for step in range(1, 9))
    assert observed[5] == pytest.approx(logged[5], rel=1e-5)


def test_every_step_is_observed_whatever_is_logged(make_trainer):
    """With a log every four steps: eight observations of one step each; the maximum that is logged is the window's."""
    guard, trainer = attached(make_trainer, logging_steps=4)
    trainer.train()
    history = guard.guard.history
    assert list(history.steps) == list(range(1, 9))
    assert [observation.window for observation in history] == [1] * 8
    maxima = list(history.column("kl_max"))
    rows = training_logs(trainer)
    assert [row["kl_guard/kl_max"] for row in rows] == pytest.approx([max(maxima[:4]), max(maxima[4:])])
    means = list(history.column("kl_mean"))
    assert [row["kl"] for row in rows] == pytest.approx([sum(means[:4]) / 4, sum(means[4:]) / 4], rel=1e-5)
    assert all(math.isfinite(value) for value in history.column("grad_norm"))
    assert all(math.isfinite(value) for value in history.column("reward"))


def test_the_learning_rate_is_that_of_the_step(make_trainer):
    """The rate that the step was made with, as the trainer logs it."""
    guard, trainer = attached(make_trainer, lr_scheduler_type="linear")
    trainer.train()
    logged = [row["learning_rate"] for row in training_logs(trainer)]
    assert list(guard.guard.history.column("learning_rate")) == pytest.approx(logged)


def test_a_blow_up_is_halted_between_logs(make_trainer):
    """The decision does not wait for the log."""
    shown = SetKL(lambda step: 1000.0 if step >= 5 else 0.01)
    guard, trainer = attached(make_trainer, shown, logging_steps=50, max_steps=20)
    trainer.train()
    assert guard.halted
    assert guard.decision.reason.step == trainer.state.global_step == 7


def test_training_is_the_same_with_tokens(make_trainer, tmp_path):
    """Nothing is computed again, no random number drawn: weights and logs equal those of a run without the guard."""
    results = []
    for number in range(2):
        trainer = make_trainer([], output_dir=tmp_path / str(number), num_iterations=2, **FAST)
        if number:
            KLGuardCallback().attach(trainer)
        trainer.train()
        rows = [{k: v for k, v in row.items() if k in ("loss", "kl", "reward")} for row in training_logs(trainer)]
        results.append((rows, [p.detach().clone() for p in trainer.model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_tool_tokens_do_not_count(make_trainer):
    """What a tool returned was not sampled from the policy."""
    guard, trainer = attached(make_trainer)
    generate = trainer._generate_and_score_completions

    def with_tools(*args):
        output = generate(*args)
        output["tool_mask"] = torch.ones_like(output["completion_mask"])
        output["tool_mask"][:, :2] = 0
        return output

    trainer._generate_and_score_completions = with_tools
    trainer.train()
    stats = guard.guard.outliers.latest
    assert all(outlier.position >= 2 for outlier in stats.outliers)
    assert stats.places[0][0] > 0
    assert kl_by_step(guard)[8] == pytest.approx(training_logs(trainer)[-1]["kl"], rel=1e-5)


def test_tokens_have_text_and_prompts(make_trainer):
    """What the tokenizer writes for the token, and how its prompt begins."""
    guard, trainer = attached(make_trainer)
    trainer.train()
    words = set(build_tokenizer().get_vocab())
    line = json.loads((guard.guard.folder / "tokens.jsonl").read_text().splitlines()[-1])
    assert all(outlier["text"] in words for outlier in line["outliers"])
    telling = [outlier for outlier in line["outliers"] if outlier["kl"] > 0.01]
    assert len(telling) > 3
    assert all(len(outlier["prompt"].split()) == 3 for outlier in telling)


def test_an_incident_shows_the_completion(make_trainer):
    """The tokens around the largest are those that the policy wrote."""
    shown = SetKL(lambda step: 1000.0 if step >= 5 else 0.01)
    guard, trainer = attached(make_trainer, shown, max_steps=20)
    generate, written = trainer._generate_and_score_completions, []

    def noted(*args):
        output = generate(*args)
        written.extend(
            row[counts.bool()].tolist()
            for row, counts in zip(output["completion_ids"], output["completion_mask"], strict=True)
        )
        return output

    trainer._generate_and_score_completions = noted
    trainer.train()
    (path,) = guard.guard.folder.glob("incidents/*")
    tokens = tokens_in(path)
    assert tokens.excerpts
    for excerpt in tokens.excerpts:
        assert any(list(excerpt.token_ids) == row[excerpt.start : excerpt.start + len(excerpt)] for row in written)
        assert excerpt.texts == tuple(build_tokenizer().convert_ids_to_tokens(list(excerpt.token_ids)))
    assert "Completion, positions" in (path / "report.html").read_text()


def test_no_text_is_written_where_none_may_be(make_trainer):
    """log_text=False: ids and figures only."""
    guard, trainer = attached(make_trainer, knobs={"log_text": False})
    trainer.train()
    written = "".join(path.read_text() for path in guard.guard.folder.rglob("*.jsonl"))
    assert '"token_id"' in written
    assert not any(word in written for word in ('"text"', '"prompt"', '"w1"', "w2 "))


def test_evaluation_is_not_observed(make_trainer):
    """Batches of an evaluation are no steps."""
    from tiny_task import build_dataset

    guard, trainer = attached(
        make_trainer, eval_dataset=build_dataset(8), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8
    )
    trainer.train()
    logged = {row["step"]: row["kl"] for row in training_logs(trainer)}
    assert kl_by_step(guard) == pytest.approx(logged, rel=1e-5)


def test_a_fused_loss_leaves_the_scalars(make_trainer, caplog):
    """Log-probs that do not pass are said once; KL is still seen in each step."""
    guard, trainer = attached(make_trainer, logging_steps=4)
    compute = trainer._compute_loss

    def fused(model, inputs):
        passed = guard._capture
        passed._in_loss = False  # as where the loss takes its log-probs from elsewhere
        return compute(model, inputs)

    trainer._compute_loss = fused
    with caplog.at_level(logging.WARNING, "kl_guard"):
        trainer.train()
    assert sum("do not pass where the guard looks for them" in r.getMessage() for r in caplog.records) == 1
    assert len(guard.guard.history) == 8
    assert math.isnan(guard.guard.history.column("top_share")[-1])
    assert math.isfinite(guard.guard.history.column("kl_mean")[-1])


def test_another_version_of_the_trainer(make_trainer, caplog):
    """Without the methods that are wrapped, what is logged is observed, and it is said."""
    guard = KLGuardCallback()
    trainer = make_trainer([guard], **FAST)
    trainer._metrics = None
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(type(trainer), "_generate_and_score_completions")
        guard.attach(trainer)
    del trainer._metrics
    from collections import defaultdict

    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    with caplog.at_level(logging.WARNING, "kl_guard"):
        trainer.train()
    assert any("only what is logged is observed" in r.getMessage() for r in caplog.records)
    assert len(guard.guard.history) == 8


@pytest.mark.parametrize("method", ["_take_tokens", "_take_metrics", "_own", "_score_faulty"])
def test_a_fault_in_the_capture_never_reaches_training(make_trainer, monkeypatch, caplog, method):
    """It is logged once, and training ends as it would."""
    from kl_guard_trl import capture

    def broken(*_, **__):
        raise ZeroDivisionError("inserted")

    if method == "_score_faulty":
        monkeypatch.setattr(capture, "summarize_tokens", broken)
    else:
        monkeypatch.setattr(capture.Capture, method, broken)
    events = Events()
    guard, trainer = attached(make_trainer, events)
    trainer.train()
    assert trainer.state.global_step == events.steps == 8
    assert sum("a fault of the guard itself" in r.getMessage() for r in caplog.records) == 1
    assert len(guard.guard.history) == 8


@pytest.mark.newest
def test_two_ranks_see_the_same(fitted, tmp_path):
    """KL is the trainer's, also where it pools over ranks; the tokens of both are told apart."""
    results, _ = launch("token_ranks.py", fitted, tmp_path, 1, 4)
    assert len(results) == 4
    for batches in (1, 4):
        first, second = sorted((r for r in results if r["batches"] == batches), key=lambda r: r["rank"])
        assert first["observed"] == pytest.approx(first["logged"], rel=1e-5)
        assert first["observed"] == second["observed"]
        assert first["tokens"] == second["tokens"]
        assert first["ranks"] == [0, 1]
        assert first["written"] == 6


# The probe.


def test_the_probe_measures_kl_where_there_is_none(make_trainer, caplog):
    """With beta 0, every second step, against the initial weights: what a reference that is given measures too."""
    fast = {**FAST, "beta": 0.0}
    guard, trainer = attached(make_trainer, knobs={"probe": "auto", "probe_every": 2}, **fast)
    with caplog.at_level(logging.WARNING, "kl_guard"):
        trainer.train()
    observed = kl_by_step(guard)
    assert [step for step, kl in observed.items() if math.isfinite(kl)] == [1, 3, 5, 7]
    assert observed[1] == pytest.approx(0.0, abs=1e-9)
    assert observed[7] > 1e-3
    assert sum(
        "the probe measures KL against the initial weights in one step of 2" in r.message for r in caplog.records
    )
    assert not [f for f in guard.guard.findings if f.signature == "KL_MISSING"]


def test_the_probe_measures_what_the_trainer_would(make_trainer, fitted, tmp_path):
    """At beta 1e-8, where TRL logs KL and training is nearly the same, the probe's reference gives TRL's KL."""
    from kl_guard_trl.probe import ReferenceProbe

    _guard, trainer = attached(make_trainer, temperature=0.7)
    reference = AutoModelForCausalLM.from_pretrained(fitted)
    probe = ReferenceProbe(trainer, reference, 1)
    probe.why_not = ""
    compared = []
    compute = trainer._compute_loss

    def compare(model, inputs):
        mask = inputs["completion_mask"].bool()
        compared.append((probe.score(inputs)[mask], inputs["ref_per_token_logps"][mask]))
        return compute(model, inputs)

    trainer._compute_loss = compare
    trainer.train()
    for ours, theirs in compared:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["initial", "given", "adapter"])
def test_the_probe_changes_nothing(make_trainer, fitted, tmp_path, kind):
    """Weights, logs, random state, training flags: those of a run without it."""
    results = []
    for number in range(2):
        torch.manual_seed(0)  # older versions draw the adapter before they seed
        settings = {**FAST, "beta": 0.0, "lora": kind == "adapter"}
        trainer = make_trainer([], output_dir=tmp_path / str(number), **settings)
        if number:
            reference = AutoModelForCausalLM.from_pretrained(fitted) if kind == "given" else None
            guard = KLGuardCallback(probe="auto", probe_every=1, reference=reference).attach(trainer)
        trainer.train()
        rows = [{k: v for k, v in row.items() if k in ("loss", "reward", "entropy")} for row in training_logs(trainer)]
        flags = [module.training for module in trainer.model.modules()]
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        results.append((rows, torch.get_rng_state(), flags, weights))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert all(torch.equal(a, b) for a, b in zip(results[0][3], results[1][3], strict=True))
    assert kl_by_step(guard)[8] > 0


def test_a_resumed_probe_measures_against_the_same_weights(make_trainer):
    """The initial weights lie in the guard's folder; the resumed policy would show no KL at all."""
    settings = {**FAST, "beta": 0.0, "save_strategy": "steps", "save_steps": 4}
    knobs = {"probe": "auto", "probe_every": 1}
    first, trainer = attached(make_trainer, knobs=knobs, **settings)
    trainer.train()
    again, resumed = attached(make_trainer, knobs=knobs, **{**settings, "max_steps": 10})
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-4")
    before, after = kl_by_step(first), kl_by_step(again)
    assert after[5] == pytest.approx(before[5], rel=1e-3)
    assert not [f for f in again.guard.findings if f.signature == "REFERENCE_RESET"]


def test_a_probe_without_memory_is_refused_with_the_figures(make_trainer, monkeypatch, caplog):
    """It says what it needs and what there is, and training goes on."""
    from kl_guard_trl import probe

    monkeypatch.setattr(probe, "_free_memory", lambda: 1000)
    _guard, trainer = attached(make_trainer, knobs={"probe": "auto"}, **{**FAST, "beta": 0.0})
    with caplog.at_level(logging.WARNING, "kl_guard"):
        trainer.train()
    said = [r.getMessage() for r in caplog.records if "no probe of the reference" in r.getMessage()]
    assert len(said) == 1
    assert "0.00 GB are free" in said[0]
    assert trainer.state.global_step == 8


def test_bad_references_are_refused():
    """Where they are given."""
    with pytest.raises(TypeError, match="reference must be a torch module, or None, got str"):
        KLGuardCallback(reference="gpt2")
    with pytest.raises(ValueError, match="probe must be one of 'off', 'auto', got 'on'"):
        KLGuardCallback(probe="on")
    with pytest.raises(ValueError, match="probe_every must be a whole number of at least 1, got 0"):
        KLGuardCallback(probe_every=0)


@pytest.mark.newest
def test_a_trainer_that_returns_something_else_goes_on(make_trainer, caplog):
    """A subclass whose scores are no pair of tensors: training is not disturbed."""
    guard, trainer = attached(make_trainer, max_steps=2)
    compute = trainer._compute_loss

    def compute_loss(model, inputs):
        loss = compute(model, inputs)
        guard._capture._score(lambda: {"logps": None})
        guard._capture._score(lambda: None)
        return loss

    trainer._compute_loss = compute_loss
    trainer.train()
    assert trainer.state.global_step == 2
    assert len([r for r in caplog.records if "fault of the guard itself" in r.getMessage()]) == 1


@pytest.mark.newest
def test_a_second_model_scored_in_the_loss_is_not_taken_for_the_policy(make_trainer):
    """A subclass scores a teacher with the trainer's own method, after the loss."""
    guard, trainer = attached(make_trainer, max_steps=3)
    compute = trainer._compute_loss

    def compute_loss(model, inputs):
        loss = compute(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(
                trainer.ref_model, ids, mask, inputs["completion_ids"].shape[1], compute_entropy=False
            )
        return loss

    trainer._compute_loss = compute_loss
    trainer.train()
    observed = kl_by_step(guard)
    tokens = guard.guard.history.column("kl_token_mean")
    assert observed[3] > 0
    assert tokens[2] == pytest.approx(observed[3], rel=0.1)


@pytest.mark.newest
def test_the_probe_leaves_what_is_frozen_frozen(make_trainer):
    """PEFT makes an adapter trainable when it is switched on again; the probe puts back what the user had set."""
    guard = KLGuardCallback(probe="auto", probe_every=1)
    trainer = make_trainer([guard], lora=True, **{**FAST, "beta": 0.0, "max_steps": 2})
    for name, parameter in trainer.model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    guard.attach(trainer)
    trainer.train()
    assert math.isfinite(guard.guard.history[-1].kl_mean)
    assert not any(p.requires_grad for name, p in trainer.model.named_parameters() if "lora_A" in name)


@pytest.mark.newest
def test_the_policy_is_no_reference(make_trainer, caplog):
    """The same object as policy and reference measures one update: refused, with what to give instead."""
    trainer = make_trainer([], **{**FAST, "beta": 0.0, "max_steps": 2})
    guard = KLGuardCallback(probe="auto", reference=trainer.model)
    guard.attach(trainer)
    trainer.train()
    assert "the reference given is the policy itself" in caplog.text


@pytest.mark.newest
def test_a_second_attached_callback_keeps_nothing(make_trainer):
    """It does nothing, and holds on to no batch."""
    first, trainer = attached(make_trainer, max_steps=3)
    second = KLGuardCallback().attach(trainer)
    trainer.train()
    assert len(first.guard.history) == 3
    assert second._capture._step.batches == []


@pytest.mark.newest
def test_initial_weights_of_an_earlier_run_are_not_taken(make_trainer, tmp_path, caplog):
    """A fresh run without probe in a used folder, resumed with one: it says that there is nothing to measure with."""
    settings = {**FAST, "beta": 0.0, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    first = make_trainer([], **settings)
    KLGuardCallback(probe="auto").attach(first)
    first.train()
    assert (tmp_path / "run" / "kl_guard" / "reference" / "initial.safetensors").is_file()
    second = make_trainer([], **settings)
    KLGuardCallback().attach(second)
    second.train()
    third = make_trainer([], **{**settings, "max_steps": 4})
    KLGuardCallback(probe="auto").attach(third)
    third.train(resume_from_checkpoint=True)
    assert "the initial weights of the resumed run are not in" in caplog.text
