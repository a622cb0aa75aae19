"""A real RL fine-tuning in Lightning on a CPU that blows up, is taken back, and ends healthy.

A tiny language model answers three words with some of them; the reward asks for the first one. After a slow start the
learning rate warms up to ten times what the task bears. The guard sees the tokens that `training_step` returns, goes
back to the checkpoint from before the trouble, lowers the learning rate and raises the KL penalty, and training goes on
to its last step inside the same call. The same settings with a guard that only speaks show where they lead. Takes under
a minute.

    python examples/lightning_rlhf.py --output-dir lightning-output
"""

from __future__ import annotations

import argparse
import copy
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from kl_guard.journal import read_journal
from kl_guard.tokens import per_token_kl
from kl_guard_lightning import KLGuardCallback, RollbackContext, fit_with_rollback

WORDS, PROMPT, ANSWER, WIDTH = 32, 3, 8, 32
STEPS, SLOW_STEPS, WARMUP_STEPS = 160, 50, 10
RATE, START = 3e-2, 0.01
BETA = 0.1
GROUP = 8  # completions of one prompt, compared with each other
HEALTHY = 0.5  # nats per token: the floor of KL_BLOWUP


class LanguageModel(nn.Module):
    """Two layers of a causal transformer over a few words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(PROMPT + ANSWER, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next word at each position, [batch, words, vocabulary]."""
        size = ids.shape[1]
        seen = nn.Transformer.generate_square_subsequent_mask(size, device=ids.device)
        hidden = self.words(ids) + self.places(torch.arange(size, device=ids.device))
        return self.head(self.layers(hidden, mask=seen, is_causal=True))

    def logprobs(self, ids: Tensor) -> Tensor:
        """Return the log-probs of the words of the answers, [batch, answer]."""
        logits = self(ids[:, :-1])[:, PROMPT - 1 :]
        return functional.log_softmax(logits, -1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)

    @torch.no_grad()
    def answer(self, prompts: Tensor) -> Tensor:
        """Sample answers; return prompts and answers, [batch, prompt + answer]."""
        ids = prompts
        for _ in range(ANSWER):
            ids = torch.cat([ids, torch.multinomial(self(ids)[:, -1].softmax(-1), 1)], 1)
        return ids


def fitted(seed: int) -> LanguageModel:
    """Return a model that answers with words of its prompt, in any order."""
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        prompts = torch.rand(32, WORDS).topk(PROMPT).indices
        ids = torch.cat([prompts, prompts.gather(1, torch.randint(PROMPT, (32, ANSWER)))], 1)
        loss = -model.logprobs(ids).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Prompts:
    """Batches of prompts without end; a checkpoint holds the place, so that going back is exact."""

    def __init__(self, seed: int) -> None:
        self.seed, self.at = seed, 0

    def __iter__(self) -> Iterator[Tensor]:
        """Yield batches from the place on."""
        while True:
            generator = torch.Generator().manual_seed(self.seed * 10_000 + self.at)
            self.at += 1
            yield torch.rand(8, WORDS, generator=generator).topk(PROMPT).indices

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place."""
        self.at = state["at"]


class Policy(pl.LightningModule):
    """The model under GRPO, with a copy of it as the reference."""

    beta: Tensor

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.reference = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("beta", torch.tensor(BETA))

    def training_step(self, prompts: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss, and what the guard needs of each token."""
        ids = self.model.answer(prompts.repeat_interleave(GROUP, 0))
        answers = ids[:, PROMPT:]
        rewards = (answers == ids[:, :1]).float().mean(1)
        groups = rewards.view(-1, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        mask = torch.ones_like(answers, dtype=torch.bool)
        policy, reference = self.model.logprobs(ids), self.reference.logprobs(ids)
        kl = per_token_kl(policy, reference, "k3", log_ratio_clip=20.0, mask=mask)
        ratio = torch.exp(policy - policy.detach())
        loss = (self.beta * kl - ratio * advantages).mean()
        self.log("reward", rewards.mean())
        self.log("beta", self.beta)
        return {
            "loss": loss,
            "policy_logprobs": policy.detach(),
            "ref_logprobs": reference,
            "mask": mask,
            "token_ids": answers,
        }

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with a rate that is raised too far."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(START, min(1.0, (step - SLOW_STEPS) / WARMUP_STEPS))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def change(context: RollbackContext) -> None:
    """Do otherwise what had failed: a tenth of the rate, five times the penalty, other samples."""
    context.scale_learning_rate(0.1**context.attempt)
    context.module.beta.fill_(BETA * 5.0**context.attempt)
    context.new_noise()


def train(model: LanguageModel, folder: Path, seed: int, guard: KLGuardCallback) -> pl.Trainer:
    """Train to the last step, or until the guard halts."""
    shutil.rmtree(folder, ignore_errors=True)
    saver = pl.callbacks.ModelCheckpoint(
        folder / "checkpoints", "{step}", every_n_train_steps=5, save_top_k=1, save_last=True
    )
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_steps=STEPS,
        callbacks=[guard, saver],
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(seed)
    fit_with_rollback(trainer, Policy(model), Prompts(seed))
    return trainer


def curves(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each attempt observed."""
    records, _ = read_journal(folder / "kl_guard" / "journal.jsonl")
    rows: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record["type"] == "observation":
            rows.setdefault(record["attempt"], []).append(record)
    return rows


def show(rows: list[dict[str, Any]], every: int = 6) -> None:
    """Print KL and reward as a curve."""
    for row in rows[::every]:
        kl, reward = float(row["kl_mean"]), float(row.get("reward", 0))
        print(f"  step {row['step']:3d}  KL {kl:8.4f}  reward {reward:5.2f}  {'#' * min(60, round(20 * kl))}")


def final(rows: list[dict[str, Any]]) -> float:
    """Return the mean KL of the last ten steps."""
    return mean(float(row["kl_mean"]) for row in rows[-10:])


def main() -> int:
    """Train twice; return 0 when the guarded run was taken back and ended healthy, and the other did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("lightning-output"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    began = time.perf_counter()

    print("Fitting a tiny language model to a toy task ...", flush=True)
    model = fitted(options.seed)
    print(f"\n=== {STEPS} steps with fit_with_rollback and action='rollback' ===", flush=True)
    guard = KLGuardCallback(action="rollback", on_rollback=change)
    trainer = train(model, options.output_dir / "guarded", options.seed, guard)
    guarded = curves(options.output_dir / "guarded")
    for attempt, decision in enumerate(guard.rollbacks):
        print(f"\n--- Attempt {attempt}, until it was stopped ---")
        show(guarded[attempt])
        if decision.reason is not None and decision.checkpoint is not None:
            print(f"  {decision.reason.signature} at step {decision.reason.step}: {decision.reason.message}")
            print(f"  departure: step {decision.reason.departure_step}; back to step {decision.checkpoint.step}")
    print("\n--- The run as it finished ---")
    attempt = max(guarded)
    show(guarded[attempt])

    print("\n=== The same settings with action='warn' ===", flush=True)
    speaks = KLGuardCallback(action="warn")
    train(model, options.output_dir / "unguarded", options.seed, speaks)
    unguarded = curves(options.output_dir / "unguarded")[0]
    show(unguarded)

    print(f"\nFinal KL: {final(guarded[attempt]):.3f} as the guard left it, {final(unguarded):.3f} without going back.")
    good = bool(guard.rollbacks) and not guard.halted and trainer.global_step == STEPS
    good = good and final(guarded[attempt]) < HEALTHY < final(unguarded)
    print(f"{'As expected' if good else 'NOT as expected'}, in {time.perf_counter() - began:.0f} s.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
