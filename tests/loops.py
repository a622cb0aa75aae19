"""A loop with all that a checkpoint must hold: dropout, buffers, a schedule, a scaler, a loader, every stream."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from kl_guard_torch import TorchGuard
from trl_state import digest, tensors_of

AS_IT_WAS = {"lr_factor": 1.0, "beta_factor": 1.0, "new_noise": False}
"""Knobs for a rollback that changes nothing."""


class Policy(nn.Module):
    """Dropout, running statistics, and a buffer that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.layers(self.norm(x)) * (1 + 1e-3 * self.seen)


class Loader:
    """Numbers in an order of its own, which goes on where it was."""

    def __init__(self, seed=3):
        self.generator = torch.Generator().manual_seed(seed)
        self.order, self.place = [], 0

    def next(self):
        if self.place >= len(self.order):
            self.order, self.place = torch.randperm(7, generator=self.generator).tolist(), 0
        self.place += 1
        return self.order[self.place - 1]

    def state_dict(self):
        return {"order": list(self.order), "place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.order, self.place = list(state["order"]), state["place"]
        self.generator.set_state(state["generator"])


class Loop:
    """One run; `step` makes a step, `state` says what is there."""

    def __init__(self, output_dir, *, wrap=lambda model, optimizer: (model, optimizer), policy=Policy, **knobs):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.model = policy()
        made = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.model, self.optimizer = wrap(self.model, made)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(made, [6, 14], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        self.loader, self.noise = Loader(), torch.Generator().manual_seed(5)
        self.guard = TorchGuard(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            output_dir=output_dir,
            extras={"loader": self.loader, "order": self.loader.generator},
            generators={"noise": self.noise},
            **knobs,
        )

    def train(self):
        """Make one update."""
        x = torch.randn(6, 8) + self.loader.next() + 0.1 * torch.randn(8, generator=self.noise)
        x = x + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(x).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def state(self):
        """Everything, as short hashes and plain values."""
        streams = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().sum().item())
        return {
            "weights": digest(tensors_of(dict(self.model.named_parameters()))),
            "buffers": digest(tensors_of(dict(self.model.named_buffers()))),
            "moments": digest(tensors_of(list(self.optimizer.state.values()))),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "scheduler": (self.scheduler.last_epoch, self.scheduler.get_last_lr()),
            "scaler": self.scaler.state_dict(),
            "loader": (list(self.loader.order), self.loader.place),
            "streams": (streams, digest([torch.get_rng_state(), self.noise.get_state()])),
        }

    def run(self, steps, kl_of=lambda step, attempt: 0.01, save_every=5, record=None):
        """Train up to `steps`; return the steps that were made, in order."""
        made, step = [], self.guard.resume()
        while step < steps:
            step += 1
            self.train()
            made.append(step)
            if record is not None:
                record[step] = self.state()
            decision = self.guard.step(step, kl_of(step, self.guard.attempt))
            if decision.action == "rollback":
                step = self.guard.rollback()
            elif decision:
                break
            elif step % save_every == 0:
                self.guard.save(step)
        self.guard.close()
        return made


def trouble(at, attempts=1):
    """KL that is beyond the ceiling for three steps from `at` on, in the first attempts."""
    return lambda step, attempt: 1000.0 if attempt < attempts and at <= step < at + 3 else 0.01
