"""What README shows is what the package does."""

import doctest
import inspect
import math
import re
from pathlib import Path

import pytest
import torch

import kl_guard_lightning
from kl_guard import GuardConfig, KLGuard, detectors, replay

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_examples_give_what_is_shown():
    """Every prompt in a code block is run."""
    blocks = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if ">>>" in b]
    assert blocks
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, {"replay": replay}, "README", "README.md", 0)
        assert doctest.DocTestRunner().run(test).failed == 0


def test_the_block_without_a_framework_runs(tmp_path, monkeypatch):
    """As it stands."""
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "GuardConfig(abs_floor" in b]
    exec(block, {})  # noqa: S102 - the README's own code
    assert (tmp_path / "out" / "kl_guard" / "journal.jsonl").is_file()


def test_the_block_about_tokens_runs():
    """With tensors of a batch."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "summarize_tokens(" in b]
    zeros = torch.zeros(2, 5)
    names = {
        "policy_logprobs": zeros - 1,
        "ref_logprobs": zeros - 2,
        "mask": zeros == 0,
        "ids": zeros.long(),
        "step": 1,
    }
    guard = KLGuard(announce=False)
    exec(block, {**names, "guard": guard})  # noqa: S102 - the README's own code
    assert guard.history[-1].kl_mean == pytest.approx(math.exp(-1))


def test_the_block_about_loops_runs(tmp_path, monkeypatch):
    """With a model, and a loader that has a state."""
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "TorchGuard(" in b]
    policy = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(policy.parameters())

    def train_step(loss_of, beta):
        scores = policy(torch.ones(3, 2))
        loss = beta * loss_of(scores, scores.detach() + 0.1, torch.ones(3, 2))
        loss.backward()
        optimizer.step()
        return loss.detach()

    names = {
        "policy": policy,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": torch.Generator(),
        "loss_of": lambda policy_logprobs, ref_logprobs, mask: (policy_logprobs * mask).sum(),
        "train_step": train_step,
        "steps": 100,
        "beta": 0.1,
    }
    exec(block, names)  # noqa: S102 - the README's own code
    assert names["guard"].guard.history[-1].kl_mean is not None
    assert (tmp_path / "out" / "checkpoint-100" / "weights.pt").is_file()


def test_the_line_for_dictionaries_runs():
    """With the names of verl."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "guard.log(" in b]
    guard = KLGuard(announce=False)
    exec(block, {"guard": guard})  # noqa: S102 - the README's own code
    assert guard.source.others == ("actor/ppo_kl",)


def test_the_loop_on_accelerate_runs(tmp_path, monkeypatch):
    """As docs/frameworks.md shows it."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "frameworks.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Accelerator()" in b]
    policy = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(policy.parameters())

    def train_step(accelerator, policy, optimizer, scheduler):
        accelerator.backward(policy(torch.ones(3, 2)).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return 0.01

    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names = {"policy": policy, "optimizer": optimizer, "scheduler": scheduler, "train_step": train_step, "steps": 100}
    exec(block, names)  # noqa: S102 - the documentation's own code
    assert (tmp_path / "out" / "checkpoint-100" / "weights.pt").is_file()


def test_every_signature_has_a_row():
    """The table is complete, and names nothing that does not exist."""
    shown = set(re.findall(r"^\| `([A-Z_]+)` \|", README, re.MULTILINE))
    known = {d.signature for d in KLGuard()._panel.detectors}
    assert shown == known
    every = {c.signature for c in vars(detectors).values() if hasattr(c, "signature")}
    assert known == every


def test_the_knobs_named_exist():
    """Options in README are fields of GuardConfig, or parameters of a callback."""
    own = set(inspect.signature(kl_guard_lightning.KLGuardCallback).parameters)
    for name in re.findall(r"`KLGuardCallback\((\w+)=", README) + re.findall(r"GuardConfig\((\w+)=", README):
        assert hasattr(GuardConfig(), name) or name in own
