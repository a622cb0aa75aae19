"""TorchGuard in a loop: what it decides, saves, refuses, and what must never disturb training."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from blocks import not_in, text_with
from torch import nn

from kl_guard import KLGuard, KLGuardHalted, replay
from kl_guard.tokens import summarize_tokens
from kl_guard_torch import TorchGuard
from kl_guard_torch.state import TrainingState
from loops import Loop, trouble

SERIES = [0.01 + 0.002 * (i % 3) for i in range(40)] + [0.02 * 1.4**i for i in range(14)]


def broken(*_, **__):
    raise RuntimeError("broken on purpose")


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_same_series_says_the_same_as_replay():
    """The findings of a loop are those of its log."""
    guard, findings = TorchGuard(action="warn", expected_steps=len(SERIES)), []
    for step, kl in enumerate(SERIES, start=1):
        findings += guard.step(step, kl).findings
    expected = replay(SERIES, action="warn").findings
    assert [(f.signature, f.step, f.onset_step, f.departure_step) for f in findings] == [
        (f.signature, f.step, f.onset_step, f.departure_step) for f in expected
    ]
    assert {"KL_GROWTH", "KL_BLOWUP"} <= {f.signature for f in findings}


def test_a_halt_keeps_the_state_and_saves_nothing_more(tmp_path, caplog):
    """The halted state is complete and out of the way; a save after the decision is refused."""
    loop = Loop(tmp_path)
    made = loop.run(30, trouble(12))
    assert made == [*range(1, 15)]
    assert loop.guard.halted
    assert loop.guard.save(14) is None
    assert "is not saved: halt is decided" in caplog.text
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
    weights = loop.state()
    other = Loop(tmp_path / "other")
    assert other.guard.resume(tmp_path / "kl_guard" / "halted" / "step-14") == 14
    assert other.state() == weights


def test_on_halt_raise():
    """The exception leaves the loop, and has the decision."""
    guard = TorchGuard(on_halt="raise")
    guard.step(1, 1000.0)
    guard.step(2, 1000.0)
    with pytest.raises(KLGuardHalted, match="KL_BLOWUP at step 3") as caught:
        guard.step(3, 1000.0)
    assert caught.value.decision.reason.step == 3


def test_only_so_many_checkpoints_are_kept_and_pins_beside_them(tmp_path):
    """Rotation takes the oldest; what the guard pinned stays."""
    loop = Loop(tmp_path, keep=2)
    loop.run(30)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-25", "checkpoint-30"]
    pins = {p.name for p in (tmp_path / "kl_guard" / "pins").glob("step-*")}
    assert {"step-25", "step-30"} < pins


def test_rotation_does_not_take_the_way_back(tmp_path):
    """With one checkpoint kept, and that from the trouble, the pin is gone back to, and put where it belongs."""
    loop = Loop(tmp_path, keep=1, action="rollback")
    made = loop.run(24, trouble(12), save_every=2)
    back = made[14]  # the first step after the rollback from step 14
    assert back <= 9
    assert loop.guard.attempt == 1


def test_a_save_that_fails_is_said_and_leaves_what_was(tmp_path, monkeypatch, caplog):
    """A full disk: no exception, no half checkpoint, the one of before is whole."""
    loop = Loop(tmp_path)
    loop.guard.resume()
    loop.guard.step(1, 0.01)
    assert loop.guard.save(1) == tmp_path / "checkpoint-1"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        loop.guard.step(2, 0.01)
        assert loop.guard.save(2) is None
    assert sum("No space left" in text for text in said(caplog)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "kl_guard"]
    loop.guard.step(3, 0.01)
    assert loop.guard.save(3) is not None


def test_a_save_of_the_same_step_puts_the_earlier_one_aside(tmp_path):
    """Nothing is overwritten."""
    loop = Loop(tmp_path)
    loop.guard.resume()
    loop.guard.step(1, 0.01)
    first = loop.guard.save(1)
    loop.train()
    assert loop.guard.save(1) == first
    assert list((tmp_path / "kl_guard" / "quarantine").glob("*checkpoint-1*"))


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path):
    """A draft is removed at the next start, a damaged newest checkpoint passed over."""
    loop = Loop(tmp_path)
    loop.run(10)
    (tmp_path / ".saving-checkpoint-11").mkdir()
    (tmp_path / "checkpoint-10" / "weights.pt").write_bytes(b"PK torn")
    again = Loop(tmp_path)
    assert again.guard.resume() == 5
    assert not list(tmp_path.glob(".saving-*"))


def test_nothing_sound_to_go_back_to(tmp_path):
    """Every checkpoint is damaged: the loop is told, and its state is left as it was."""
    loop = Loop(tmp_path, action="rollback", pin_start=False)
    loop.guard.resume()
    for step in range(1, 15):
        loop.train()
        loop.guard.step(step, trouble(12)(step, 0))
        if step == 5:
            loop.guard.save(step)
    assert loop.guard.decision.action == "rollback"
    loop.guard.guard.checkpoints.wait()
    for file in tmp_path.rglob("weights.pt"):
        file.write_bytes(b"nothing")
    before = loop.state()
    with pytest.raises(KLGuardHalted, match="not sound any more"):
        loop.guard.rollback()
    assert loop.state() == before
    assert loop.guard.halted


def test_a_check_that_fails_is_named(tmp_path, monkeypatch):
    """Weights that are not those of the checkpoint: training does not go on."""
    loop = Loop(tmp_path, action="rollback")
    put = TrainingState.put

    def put_wrongly(self, read):
        step = put(self, read)
        with torch.no_grad():
            next(iter(self.models.values())).layers[0].weight.add_(1)
        return step

    monkeypatch.setattr(TrainingState, "put", put_wrongly)
    with pytest.raises(KLGuardHalted, match="rank 0: weights: "):
        loop.run(24, trouble(12))
    assert loop.guard.halted


def test_a_rollback_without_a_decision():
    """A mistake in the loop is said as one."""
    with pytest.raises(RuntimeError, match="there is no rollback to make: the decision is 'continue'"):
        TorchGuard().rollback()


def test_extras_that_only_unpickling_could_read(tmp_path, caplog):
    """They are named once, the rest is saved, and nothing is unpickled."""

    class Odd:
        def state_dict(self):
            return {"array": np.zeros(3)}

        def load_state_dict(self, state):
            raise AssertionError

    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    guard = TorchGuard(model=model, optimizer=optimizer, output_dir=tmp_path, extras={"odd": Odd()})
    guard.resume()
    for step in (1, 2):
        guard.step(step, 0.01)
        assert guard.save(step) is not None
    assert sum("the state of 'odd' is not saved" in text for text in said(caplog)) == 1
    assert TorchGuard(model=model, optimizer=optimizer, output_dir=tmp_path, extras={"odd": Odd()}).resume() == 2


def test_an_extra_that_raises_does_not_cost_the_rest(tmp_path, caplog):
    """It is named, everything else is saved."""

    class Broken:
        state_dict = load_state_dict = broken

    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    guard = TorchGuard(model=model, optimizer=optimizer, output_dir=tmp_path, extras={"loader": Broken()})
    guard.step(1, 0.01)
    assert guard.save(1) is not None
    assert "the state of 'loader' is not saved" in caplog.text


def test_a_checkpoint_of_another_model(tmp_path):
    """Refused where it is asked for, with what does not fit."""
    first = nn.Linear(2, 2)
    guard = TorchGuard(model=first, optimizer=torch.optim.Adam(first.parameters()), output_dir=tmp_path)
    guard.step(1, 0.01)
    guard.save(1)
    other = nn.Linear(3, 2)
    guard = TorchGuard(model=other, optimizer=torch.optim.Adam(other.parameters()), output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"(?s)checkpoint-1 does not fit what is trained: .*size mismatch for weight"):
        guard.resume()


@pytest.mark.parametrize("step", [-1, None, 2.5])
def test_a_save_of_no_step(tmp_path, step):
    """There is no name for it."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="step must be a whole number"):
        TorchGuard(model=model, output_dir=tmp_path).save(step)


def test_a_fresh_start_in_a_used_folder(tmp_path):
    """`fresh=True` leaves the old checkpoints alone and begins a new journal."""
    Loop(tmp_path).run(10)
    loop = Loop(tmp_path)
    assert loop.guard.resume(fresh=True) == 0
    loop.guard.step(1, 0.01)
    assert [o.step for o in loop.guard.guard.history] == [1]
    assert loop.guard.save(1) is not None
    loop.guard.close()
    assert Loop(tmp_path).guard.resume() == 1  # not the newest of the run that was left
    assert len(list(tmp_path.glob("earlier-checkpoint-*"))) == 2


@pytest.mark.parametrize("kind", ["numpy rates", "counters inside"])
def test_schedulers_with_types_of_their_own(tmp_path, kind):
    """Rates that are numpy's, and the counter of a MultiStepLR inside another: restored, and the steps after work."""
    lr = torch.optim.lr_scheduler
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if kind == "numpy rates":
        scheduler = lr.LambdaLR(optimizer, lambda k: 0.5 * (1 + np.cos(np.pi * k / 100)))
    else:
        scheduler = lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.MultiStepLR(optimizer, [4, 8])], [3])
    guard = TorchGuard(action="rollback", model=model, optimizer=optimizer, scheduler=scheduler, output_dir=tmp_path)
    step, rates = guard.resume(), {}
    while step < 24:
        step += 1
        optimizer.step()
        scheduler.step()
        rates.setdefault(step, []).append(float(optimizer.param_groups[0]["lr"]))
        decision = guard.step(step, trouble(12)(step, guard.attempt))
        if decision.action == "rollback":
            step = guard.rollback()
        elif step % 5 == 0:
            assert guard.save(step) is not None
    assert guard.attempt == 1
    assert all(again[1] == pytest.approx(0.5 * again[0]) for again in rates.values() if len(again) > 1)
    guard.close()


def test_a_scheduler_without_an_optimizer_of_its_name():
    """A change of the learning rate would be undone by it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match="scheduler 'c' has no optimizer of its name; there are: a, b"):
        TorchGuard(optimizer={"a": optimizer, "b": optimizer}, scheduler={"c": scheduler})


@pytest.mark.parametrize("action", ["halt", "rollback"])
@pytest.mark.parametrize("name", ["_observe", "checkpoint_saved", "resumed", "_stand", "recover", "go_back"])
def test_a_fault_in_the_guard_does_not_reach_the_loop(tmp_path, monkeypatch, name, action):
    """Each part made to raise: the loop makes its steps; where it can be halted or taken back still, it is."""
    monkeypatch.setattr(KLGuard, name, broken)
    assert Loop(tmp_path / "calm", action=action).run(16) == [*range(1, 17)]
    loop = Loop(tmp_path / "trouble", action=action)
    if name == "go_back" and action == "rollback":
        with pytest.raises(KLGuardHalted, match="nothing sound to go back to"):
            loop.run(16, trouble(12))
    else:
        assert loop.run(16, trouble(12))[:14] == [*range(1, 15)]


def test_training_is_not_changed_by_being_watched(tmp_path):
    """Watched with tokens, saved and pinned, or not at all: the same weights, the same streams."""
    plain = Loop(None)
    for _ in range(12):
        plain.train()
    watched = Loop(tmp_path, action="rollback")
    watched.run(12, save_every=3)
    assert watched.state() == plain.state()


def tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    policy = -torch.rand(4, 9, generator=generator)
    reference = policy + 0.3 * torch.randn(4, 9, generator=generator)
    mask = torch.rand(4, 9, generator=generator) < 0.8
    return policy, reference, mask, torch.randint(0, 9, (4, 9), generator=generator)


def test_tokens_in_three_ways():
    """As tensors, as a summary, and through the loss function: the same observation."""
    batch = tokens(0)
    ways = {}
    guard = TorchGuard()
    guard.step(1, policy_logprobs=batch[0], ref_logprobs=batch[1], mask=batch[2], token_ids=batch[3])
    ways["tensors"] = guard
    ways["summary"] = TorchGuard()
    ways["summary"].step(1, tokens=summarize_tokens(*batch))
    ways["loss"] = TorchGuard()
    seen = ways["loss"].watch_loss(lambda lp, ref_lp, keep, token_ids: lp.sum(), **NAMES)
    assert seen(batch[0], batch[1], keep=batch[2], token_ids=batch[3]) == batch[0].sum()
    ways["loss"].step(1)
    first, *others = [way.guard.history[-1] for way in ways.values()]
    assert first.kl_mean == pytest.approx(summarize_tokens(*batch).read().kl_mean)
    assert all(other == first for other in others)


def test_special_tokens_are_told_apart(tmp_path):
    """In what is kept of a step: KL without them, in the tensors given and in those of a loss."""
    batch = tokens(0)
    expected = summarize_tokens(*batch, special_ids=[0, 1, 2]).read().kl_without_special
    assert expected is not None
    guard = TorchGuard(output_dir=tmp_path, special_ids=torch.tensor([2, 1, 0]))
    seen = guard.watch_loss(lambda lp, ref_lp, keep, token_ids: lp.sum(), **NAMES)
    guard.step(1, policy_logprobs=batch[0], ref_logprobs=batch[1], mask=batch[2], token_ids=batch[3])
    seen(batch[0], batch[1], keep=batch[2], token_ids=batch[3])
    guard.step(2)
    guard.close()
    lines = (tmp_path / "kl_guard" / "tokens.jsonl").read_text().splitlines()
    kept = [json.loads(line)["kl_without_special"] for line in lines]
    assert kept == [pytest.approx(expected)] * 2


NAMES = {"policy_logprobs": "lp", "ref_logprobs": "ref_lp", "mask": "keep"}


def test_micro_batches_of_a_watched_loss_make_one_step():
    """KL is the mean over micro-batches; an evaluation without gradients is no part of it."""
    guard = TorchGuard()
    seen = guard.watch_loss(lambda lp, ref_lp, keep: lp.sum(), **NAMES)
    parts = [tokens(1)[:3], tokens(2)[:3]]
    for part in parts:
        seen(*part)
    with torch.no_grad():
        seen(*tokens(3)[:3])
    guard.step(1)
    means = [summarize_tokens(*part).read().kl_mean for part in parts]
    assert guard.guard.history[-1].kl_mean == pytest.approx(sum(means) / 2)
    guard.step(2, 0.5)
    assert guard.guard.history[-1].kl_mean == 0.5
    assert guard.guard.history[-1].kl_token_mean is None


def test_a_watched_loss_is_never_disturbed(caplog):
    """Tensors that cannot be summed up: the loss comes out, one message, the step counts without tokens."""
    guard = TorchGuard()
    seen = guard.watch_loss(lambda lp, ref_lp, keep: 7, **NAMES)
    for step in (1, 2):
        assert seen(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(5)) == 7
        guard.step(step, 0.01)
    assert sum("fault of the guard itself" in text for text in said(caplog)) == 1
    assert len(guard.guard.history) == 2


def test_a_loss_without_such_arguments():
    """The message has what there is, and how to say which is which."""
    with pytest.raises(TypeError, match=r"no argument 'policy_logprobs'; it has: x, y\. Say which"):
        TorchGuard().watch_loss(lambda x, y: x)
    with pytest.raises(TypeError, match="watch_loss has no argument 'refs'; there are: policy_logprobs"):
        TorchGuard().watch_loss(lambda x, y: x, refs="y")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model must have state_dict, got int"),
        ({"model": nn.Linear(1, 1), "optimizer": 3}, "optimizer must have param_groups, got int"),
        ({"scheduler": {"a": 3}}, r"scheduler\['a'\] must have load_state_dict, got int"),
        ({"extras": {"loader": []}}, r"extras\['loader'\] must have state_dict and load_state_dict, got list"),
        ({"keep": 0}, "keep must be a whole number of at least 1, or None, got 0"),
        ({"on_rollback": 1}, "on_rollback must be a function"),
        ({"acton": "halt"}, "did you mean 'action'"),
    ],
)
def test_bad_input_is_refused_where_it_is_set(arguments, message):
    """Field, value, what is allowed."""
    with pytest.raises((TypeError, ValueError), match=message):
        TorchGuard(**arguments)


def test_what_a_rollback_needs_is_said_at_the_start(caplog):
    """Without a model it can only halt, and says so."""
    guard = TorchGuard(action="rollback")
    assert guard.config.action == "halt"
    assert "give model and optimizer and output_dir" in caplog.text


def test_half_given_tokens_are_one_warning(caplog):
    """A mask is never guessed."""
    caplog.set_level(logging.WARNING)
    guard = TorchGuard()
    for step in (1, 2):
        guard.step(step, 0.01, policy_logprobs=torch.zeros(1, 2), ref_logprobs=torch.zeros(1, 2))
    assert sum("tokens are not seen: mask missing" in text for text in said(caplog)) == 1


def test_without_torch_one_line_says_what_to_install(tmp_path):
    """The adapter names its extra."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    code = "import sys; sys.path.insert(0, sys.argv[1])\nimport kl_guard_torch"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "pip install 'kl-guard[torch]'" in run.stderr.strip().splitlines()[-1]


def test_the_example_comes_back(tmp_path, monkeypatch, capsys):
    """`examples/torch_loop.py`: it blows up, is taken back, and ends below the floor of a blow-up."""
    import torch_loop

    monkeypatch.setattr(sys, "argv", ["torch_loop.py", "--output-dir", str(tmp_path)])
    torch_loop.main()
    out = capsys.readouterr().out
    steps, rollbacks, kl = re.search(r"steps (\d+), rollbacks (\d+), KL of the last 10 steps ([\d.]+)", out).groups()
    assert int(steps) == torch_loop.STEPS
    assert int(rollbacks) >= 1
    assert float(kl) < 0.5
    assert not not_in(out, text_with("KL of the last 10 steps")), "README shows something else"
