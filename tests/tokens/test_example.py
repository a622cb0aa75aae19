"""The plain loop: a loss that no token can blow up, and training that the guard watches."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from blocks import not_in, text_with

import raw_grpo_loss
from raw_grpo_loss import grpo_loss


def batch(rows=4, width=10):
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(rows, width, generator=generator)
    old = policy + 0.3 * torch.randn(rows, width, generator=generator)
    reference = policy + 0.3 * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    return policy, old, reference, torch.randn(rows, generator=generator), mask


def test_it_is_the_loss_of_the_paper():
    """On a sane batch: clipped objective less beta times k3, the mean over sampled tokens."""
    policy, old, reference, advantages, mask = batch()
    ratio, gain = (policy - old).exp(), advantages.unsqueeze(1)
    x = reference - policy
    expected = 0.05 * (x.exp() - x - 1) - torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    assert grpo_loss(policy, old, reference, advantages, mask).item() == pytest.approx(expected[mask].mean().item())


@pytest.mark.parametrize("value", [-200.0, -math.inf, math.inf, math.nan])
def test_what_the_mask_hides_has_no_gradient(value):
    """Padding may hold anything."""
    policy, old, reference, advantages, mask = batch()
    policy[~mask] = value
    policy.requires_grad_()
    grpo_loss(policy, old, reference, advantages, mask).backward()
    assert torch.isfinite(policy.grad).all()
    assert not policy.grad[~mask].any()


def test_one_token_does_not_set_the_gradient():
    """200 nats away from the reference: clipped, it pulls at nothing."""
    policy, old, reference, advantages, mask = batch()
    mask[0, 0], policy[0, 0], old[0, 0] = True, -200.0, -200.0
    policy.requires_grad_()
    loss = grpo_loss(policy, old, reference, advantages, mask)
    loss.backward()
    assert math.isfinite(loss.item())
    assert policy.grad.abs().max() < 1.0


def test_the_example_trains_and_is_watched(monkeypatch, capsys, tmp_path):
    """As it is run from the command line."""
    monkeypatch.setattr(sys, "argv", ["raw_grpo_loss.py", "--steps", "10", "--output-dir", str(tmp_path)])
    raw_grpo_loss.main()
    out = capsys.readouterr().out
    assert "naive        nan" in out
    assert not not_in(out, text_with("grad norm: naive")), "README shows something else"
    assert "step  10" in out
    assert len((tmp_path / "kl_guard" / "tokens.jsonl").read_text().splitlines()) == 10
