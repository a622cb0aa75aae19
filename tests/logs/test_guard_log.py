"""guard.log: a trainer's dictionaries, by its own names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kl_guard import KLGuard


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_choice_is_said_once_and_kept(caplog):
    """A KL of another kind that comes alone in a later log is not mixed in."""
    guard = KLGuard(rank=0)
    guard.log({"actor/kl_loss": 0.02, "actor/ppo_kl": 0.001}, step=1)
    guard.log({"actor/ppo_kl": 5.0}, step=2)
    guard.log({"actor/kl_loss": 0.03, "actor/ppo_kl": 0.002}, step=3)
    assert [o.kl_mean for o in guard.history] == [0.02, 0.03]
    chosen = [text for text in said(caplog) if "KL is read from 'actor/kl_loss' (k3)" in text]
    assert len(chosen) == 1
    assert "actor/ppo_kl" in chosen[0]
    assert guard.source.others == ("actor/ppo_kl",)


@pytest.mark.parametrize("make", [float, str, np.float32, torch.tensor, lambda x: torch.tensor([x])])
def test_values_of_any_kind(make):
    """Numbers, text, numpy scalars, tensors."""
    guard = KLGuard(announce=False)
    guard.log({"kl": make(0.25), "reward": make(0.5)}, step=make(3.0))
    assert (guard.history[-1].step, guard.history[-1].kl_mean, guard.history[-1].reward) == (3, 0.25, 0.5)


def test_logs_of_one_step_add_up():
    """Some trainers log rollouts and updates apart."""
    guard = KLGuard(announce=False)
    guard.log({"rollout/raw_reward": 0.5}, step=1)
    guard.log({"train/kl_loss": 0.02, "train/ppo_kl": 0.01, "train/pg_loss": 0.3, "train/lr-pg_0": 1e-6}, step=1)
    (only,) = guard.history
    assert (only.kl_mean, only.reward, only.learning_rate) == (0.02, 0.5, 1e-6)


def test_the_step_is_found_or_counted():
    """Among the metrics, else one after the other."""
    guard = KLGuard(announce=False)
    guard.log({"kl": 0.1, "global_step/max_steps": "5/100"})
    guard.log({"kl": 0.1})
    guard.log({"kl": 0.1, "train/global_step": 9})
    assert list(guard.history.steps) == [5, 6, 9]


def test_a_sum_over_sequences_is_judged_as_one():
    """150 nats of a whole sequence are no 150 nats per token; the same numbers as a token mean halt."""
    sums, tokens = KLGuard(announce=False), KLGuard(announce=False)
    for step in range(1, 8):
        sums.log({"objective/kl": 150.0 + step % 3, "objective/scores": 1.0}, step=step)
        tokens.log({"kl": 150.0 + step % 3}, step=step)
    assert sums.config.kl_kind == "sequence_sum"
    assert sums.decision.action == "continue"
    assert tokens.decision.action == "halt"


def test_key_decides(caplog):
    """What the user names is read; a change of mind in mid-run is said to be too late."""
    guard = KLGuard(rank=0)
    guard.log({"actor/kl_loss": 0.02, "my/kl": 0.5}, step=1, key="my/kl")
    guard.log({"actor/kl_loss": 0.02, "my/kl": 0.6}, step=2, key="actor/kl_loss")
    assert [o.kl_mean for o in guard.history] == [0.5, 0.6]
    assert sum("comes too late" in text for text in said(caplog)) == 1


@pytest.mark.parametrize(
    "metrics", [None, 3, "kl", {1: 2}, {"kl": object()}, {"kl": [1, 2]}, {"kl": "high"}, {}, {"kl": None}]
)
def test_it_never_raises(metrics, caplog):
    """Whatever comes, it is one warning at most, and later logs count."""
    guard = KLGuard(rank=0)
    for _ in range(3):
        assert guard.log(metrics, step=1).action == "continue"
    assert not guard.blind
    assert len([text for text in said(caplog) if "KL is read" not in text and "KL_" not in text]) <= 1
    guard.log({"kl": 0.5}, step=2)
    assert guard.history[-1].kl_mean == 0.5


def test_a_resumed_run_keeps_the_kind(tmp_path):
    """The journal says which kind its numbers are."""
    first = KLGuard(output_dir=tmp_path, announce=False)
    for step in range(1, 6):
        first.log({"objective/kl": 150.0, "objective/scores": 1.0}, step=step)
    first.close()
    again = KLGuard(output_dir=tmp_path, announce=False)
    again.resumed(5)
    for step in range(6, 12):
        decision = again.log({"objective/kl": 150.0, "objective/scores": 1.0}, step=step)
    assert decision.action == "continue"
    assert len(again.history) == 11
    again.close()
