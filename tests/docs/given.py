"""What a reader of a page has already: the names that its blocks use."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch

TINY = {"steps": 100, "beta": 0.1}


def trl() -> dict[str, Any]:
    """A model, a reward and a dataset; 14 steps of training."""
    from tiny_task import GRPO, build_dataset, build_tokenizer, reward, save_fitted
    from trl import GRPOConfig

    args = GRPOConfig(output_dir="run", **{**GRPO, "max_steps": 14, "save_strategy": "steps", "save_steps": 5})
    return {
        "model": save_fitted("model"),
        "tokenizer": build_tokenizer(),
        "args": args,
        "reward": reward,
        "dataset": build_dataset(8),
    }


def lightning() -> dict[str, Any]:
    """A module that logs KL, a loader, and settings of a trainer; ten steps."""
    from lightning.pytorch import LightningModule

    class Policy(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 4)

        def score(self, batch):
            policy = self.layer(batch).log_softmax(-1)
            ids = torch.zeros(policy.shape, dtype=torch.long)
            return policy, policy.detach() - 0.1, torch.ones_like(policy), ids, -policy.mean()

        def training_step(self, batch, batch_idx):
            *_, loss = self.score(batch)
            self.log("kl_mean", 0.01)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    settings = {
        "max_steps": 10,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return {"module": Policy(), "loader": torch.ones(20, 1, 2), "settings": settings, "BETA": 0.1}


def loop() -> dict[str, Any]:
    """A model with its optimizer, a loss function, a training step, and the tensors of a batch."""
    policy = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(policy.parameters())
    zeros = torch.zeros(2, 5)

    def train_step(loss_of, beta):
        scores = policy(torch.ones(3, 2))
        loss = beta * loss_of(scores, scores.detach() + 0.1, torch.ones(3, 2))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return TINY | {
        "policy": policy,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": torch.Generator(),
        "loss_of": lambda policy_logprobs, ref_logprobs, mask: (policy_logprobs * mask).sum(),
        "train_step": train_step,
        "policy_logprobs": zeros - 1,
        "ref_logprobs": zeros - 1.01,
        "mask": zeros == 0,
        "ids": zeros.long(),
    }


def batch() -> dict[str, Any]:
    """The log-probs of a batch, and a guard."""
    from kl_guard import KLGuard

    names = ("policy_logprobs", "ref_logprobs", "mask", "ids")
    return {name: value for name, value in loop().items() if name in names} | {"guard": KLGuard(), "step": 1}


def runs() -> dict[str, Any]:
    """Logs of finished runs, the folder of one that had the guard, and the command of a scheduler."""
    from kl_guard import GuardConfig, KLGuard
    from kl_guard.tokens import summarize_tokens

    with Path("docs/data/kl_blowup.csv").open(newline="") as file:
        kls = [(int(row["step"]), float(row["kl_mean"])) for row in csv.DictReader(file)]
    rows = [{"step": step, "kl": kl, "loss": 0.1} for step, kl in kls]
    Path("run").mkdir()
    Path("run/trainer_state.json").write_text(json.dumps({"log_history": rows, "global_step": len(rows)}))
    for name in ("a.jsonl", "b.jsonl", "train.log"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("log.txt").write_text("".join(f"{row}\n" for row in rows))
    guard = KLGuard(GuardConfig(action="warn"), output_dir="run", announce=False)
    known = batch()
    tokens = summarize_tokens(known["policy_logprobs"], known["ref_logprobs"], known["mask"], token_ids=known["ids"])
    for row in rows:
        guard.observe(row["step"], row["kl"], tokens=tokens)
    guard.close()
    Path("bin").mkdir()
    Path("bin/scancel").write_text('#!/bin/sh\necho "$1" > stopped\n')
    Path("bin/scancel").chmod(0o755)
    return {}


def accelerate() -> dict[str, Any]:
    """A model with its optimizer, and a training step on accelerate."""
    policy = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(policy.parameters())

    def train_step(accelerator, policy, optimizer, scheduler):
        accelerator.backward(policy(torch.ones(3, 2)).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return 0.01

    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return TINY | {"policy": policy, "optimizer": optimizer, "scheduler": scheduler, "train_step": train_step}


def metrics() -> dict[str, Any]:
    """What a trainer logs in a step, by the names of verl."""
    return {"metrics": {"actor/kl_loss": 0.02, "actor/ppo_kl": 0.001, "critic/score/mean": 0.4}, "step": 1}
