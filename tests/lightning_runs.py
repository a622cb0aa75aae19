"""Tiny real Lightning runs whose KL is a given series."""

from __future__ import annotations

import hashlib
import logging

import lightning.pytorch as pl
import pytorch_lightning
import torch
from torch.utils.data import DataLoader, Dataset

SIZE = 8


class Numbers(Dataset):
    """Rows of numbers."""

    def __init__(self, count: int = 64) -> None:
        self.rows = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Resumable:
    """Batches in an order of its own, shuffled anew in each epoch, that keep their place."""

    def __init__(self, batch_size: int = 4, count: int = 64, rank: int = 0, world: int = 1) -> None:
        self.rows, self.batch_size, self.rank, self.world = Numbers(count).rows, batch_size, rank, world
        self.epoch = self.at = 0

    def __len__(self) -> int:
        return len(self.rows) // (self.batch_size * self.world)

    def __iter__(self):
        while self.at < len(self):
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
            start = (self.at * self.world + self.rank) * self.batch_size
            self.at += 1
            yield self.rows[order[start : start + self.batch_size]]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


def module_of(package):
    """Return a module class of one of the two packages."""

    class Policy(package.LightningModule):
        """Two layers with dropout and noise; logs the KL of each step as `kl` says."""

        def __init__(self, kl=lambda step: 0.01, name="kl_mean", log_every=1, steps_per_batch=None, lr=1e-2):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(SIZE, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
            self.kl, self.name, self.log_every, self.lr = kl, name, log_every, lr
            self.automatic_optimization = steps_per_batch is None
            self.steps_per_batch = steps_per_batch
            self.extra = {}

        def training_step(self, batch, batch_idx):
            step = self.global_step + 1
            noise = torch.randn(len(batch), 1, device=batch.device)
            loss = (self.net(batch) - noise).pow(2).mean()
            if step % self.log_every == 0 and self.name:
                value = self.kl(step)
                if value is not None:
                    self.log(self.name, torch.tensor(float(value), dtype=torch.float64))
            self.log("entropy", 1.0)
            if not self.automatic_optimization:
                for _ in range(self.steps_per_batch):
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward((self.net(batch) - noise).pow(2).mean())
                    optimizer.step()
                return {"loss": loss.detach(), **self.extra}
            return {"loss": loss, **self.extra}

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Policy


Policy = module_of(pl)
OldPolicy = module_of(pytorch_lightning)


class Record(pl.Callback):
    """Keeps a hash of weights, moments, rates and random state after each batch, before anybody saves."""

    def __init__(self):
        self.steps, self.states, self.rates = [], {}, {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        step = trainer.global_step
        digest = hashlib.sha256()
        for parameter in pl_module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    digest.update(torch.as_tensor(value).numpy().tobytes())
        self.steps.append(step)
        self.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]
        random = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]
        self.states[step] = [digest.hexdigest()[:16], random]


def trainer_of(folder, callbacks=(), package=pl, **settings):
    """Return a quiet trainer on the CPU."""
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    usual = {
        "max_steps": 14,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, package.callbacks.Checkpoint) for c in callbacks),
    }
    return package.Trainer(default_root_dir=str(folder), callbacks=list(callbacks), **{**usual, **settings})


def each(steps, package=pl, **settings):
    """Return a checkpoint callback that saves every so many steps and keeps all."""
    usual = {"filename": "{step}", "every_n_train_steps": steps, "save_top_k": -1}
    return package.callbacks.ModelCheckpoint(**{**usual, **settings})


def loader(count=64, batch_size=4):
    """Return a plain loader in the order of the data."""
    return DataLoader(Numbers(count), batch_size=batch_size)


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "kl_guard"]
