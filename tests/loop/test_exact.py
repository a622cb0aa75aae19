"""After `rollback()` a loop goes on as if it had never been disturbed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launch import launch
from loops import AS_IT_WAS, Loop, trouble


def compile_of(model, optimizer):
    return torch.compile(model, backend="eager"), optimizer


@pytest.mark.parametrize("wrap", [None, compile_of])
def test_every_tensor_and_stream_is_as_it_was(tmp_path, wrap):
    """Weights, buffers, moments, schedule, scaler, loader, streams, and the ten steps that follow, are the same."""
    wraps = {} if wrap is None else {"wrap": wrap}
    calm, disturbed = {}, {}
    Loop(tmp_path / "calm", **AS_IT_WAS, **wraps).run(24, record=calm)
    loop = Loop(tmp_path / "disturbed", action="rollback", **AS_IT_WAS, **wraps)
    made = loop.run(24, trouble(12), record=disturbed)
    assert made == [*range(1, 15), *range(6, 25)]  # from 14 back to step 5: the departure is dated 10
    assert disturbed == calm


def test_back_to_the_start(tmp_path):
    """Trouble before the first checkpoint: the state at the start was kept."""
    calm, disturbed = {}, {}
    Loop(tmp_path / "calm", **AS_IT_WAS).run(12, record=calm, save_every=100)
    loop = Loop(tmp_path / "disturbed", action="rollback", **AS_IT_WAS)
    made = loop.run(12, trouble(4), record=disturbed, save_every=100)
    assert made == [*range(1, 7), *range(1, 13)]
    assert disturbed == calm
    assert not (tmp_path / "disturbed" / "kl_guard" / "start").exists()


def test_a_new_process_goes_on_exactly(tmp_path):
    """`resume()` loads the newest checkpoint."""
    calm, resumed = {}, {}
    Loop(tmp_path / "calm").run(20, record=calm)
    first = Loop(tmp_path / "cut")
    first.run(13)
    torch.rand(100)
    second = Loop(tmp_path / "cut")
    assert second.run(20, record=resumed)[0] == 11
    assert all(resumed[step] == calm[step] for step in resumed)


def test_a_rollback_that_a_killed_process_had_decided_on(tmp_path):
    """The next process finishes it, with what it changes, and the budget counts."""
    loop = Loop(tmp_path, action="rollback", lr_factor=0.5)
    made = []
    step = loop.guard.resume()
    while not loop.guard.decision:
        step += 1
        loop.train()
        loop.guard.step(step, trouble(12)(step, 0))
        made.append(step)
        if step % 5 == 0:
            loop.guard.save(step)
    loop.guard.close()  # the process ends between decision and rollback
    again = Loop(tmp_path, action="rollback", lr_factor=0.5)
    assert again.guard.resume() == 5
    assert again.guard.attempt == 1
    assert again.guard.guard.changes.learning_rate == 0.5
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5)
    again.guard.close()


def test_what_a_rollback_changes(tmp_path):
    """Learning rate, KL penalty and noise are those of the attempt, absolute factors, and the journal knows."""
    states = {}
    loop = Loop(tmp_path, action="rollback", lr_factor=0.5, beta_factor=3.0)
    loop.run(24, trouble(12, attempts=2), record=states)
    assert loop.guard.attempt == 1 or loop.guard.halted  # the same place twice is no matter of luck
    assert loop.guard.beta_factor == 3.0
    third = Loop(tmp_path / "other", action="rollback", lr_factor=0.5, beta_factor=3.0)
    places = {0: 12, 1: 17}
    third.run(30, lambda step, attempt: trouble(places.get(attempt, 99), 9)(step, attempt), record=states)
    assert third.guard.attempt == 2
    assert third.guard.beta_factor == 9.0
    assert third.scheduler.base_lrs == [pytest.approx(1e-2 * 0.25)]
    third.guard.close()


def test_two_ranks(tmp_path):
    """With DDP and with FSDP: one rank alone sees the trouble; both go back, and go on as an undisturbed run does."""
    results, _ = launch("ranks.py", tmp_path, "ddp", "fsdp", folder="loop")
    assert sorted(result["kind"] for result in results) == ["ddp", "ddp", "fsdp", "fsdp"]
    for result in results:
        assert result["made"] == [*range(1, 15), *range(6, 19)]
        assert result["same"]


def test_accelerate(tmp_path):
    """Wrapped by accelerate it is the same."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    calm, disturbed = {}, {}
    Loop(tmp_path / "calm", wrap=accelerator.prepare, **AS_IT_WAS).run(18, record=calm)
    loop = Loop(tmp_path / "disturbed", wrap=accelerator.prepare, action="rollback", **AS_IT_WAS)
    assert loop.run(18, trouble(12), record=disturbed)[14:16] == [6, 7]
    assert disturbed == calm


def test_several_models(tmp_path):
    """Actor and critic, each with its optimizer; the checkpoint does not depend on the wrapping."""
    from kl_guard_torch import TorchGuard

    models = {"actor": nn.Linear(3, 3), "critic": nn.Linear(3, 1)}
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    with TorchGuard(action="rollback", model=models, optimizer=optimizers, output_dir=tmp_path) as guard:
        assert guard.resume() == 0
        before = {name: model.weight.detach().clone() for name, model in models.items()}
        for step in range(1, 9):
            for name, model in models.items():
                model(torch.randn(4, 3)).square().mean().backward()
                optimizers[name].step()
            if guard.step(step, 1000.0 if step > 4 else 0.01).action == "rollback":
                break
        assert guard.rollback() == 0
        for name, model in models.items():
            assert torch.equal(model.weight, before[name])
            assert not optimizers[name].state
