"""A toy task for real GRPO runs on a CPU: a tiny tokenizer, a two-layer model, its fine-tuning and a reward.

A prompt is three words; the fine-tuned model answers with some of these words in any order. The reward asks for the
first of them, so a policy under GRPO moves away from its reference in small steps that KL shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

WORDS = [f"w{i}" for i in range(29)]
PROMPT_WORDS = 3
ANSWER_WORDS = 6

GRPO: dict[str, Any] = {
    "beta": 0.1,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 10,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
"""Arguments of a healthy run, for `GRPOConfig` and `RLOOConfig`."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 32 whole words; padding and end-of-sequence differ."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2ForCausalLM:
    """Return a two-layer Qwen2 of some 21,000 parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def prompts(count: int, seed: int = 0) -> list[str]:
    """Return prompts of three different words."""
    rng = random.Random(seed)
    return [" ".join(rng.sample(WORDS, PROMPT_WORDS)) for _ in range(count)]


def build_dataset(count: int = 64, seed: int = 0) -> Dataset:
    """Return prompts in the form that the TRL trainers take."""
    return Dataset.from_dict({"prompt": prompts(count, seed)})


def fit(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int = 300, seed: int = 0) -> float:
    """Fine-tune the model on the toy task; return the last loss, in nats per token."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    eos, loss = tokenizer.eos_token, torch.tensor(0.0)
    model.train()
    for _ in range(steps):
        asked = [rng.sample(WORDS, PROMPT_WORDS) for _ in range(32)]
        texts = [" ".join([*words, *rng.choices(words, k=rng.randint(3, ANSWER_WORDS)), eos]) for words in asked]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :PROMPT_WORDS] = -100
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return float(loss.detach())


def save_fitted(folder: str | Path, seed: int = 0) -> str:
    """Build and fine-tune a model, and save it with its tokenizer; return the folder for `GRPOTrainer(model=...)`."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    fit(model, tokenizer, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return for each completion the share of its words that are the first word of its prompt."""
    shares = []
    for prompt, completion in zip(prompts, completions, strict=True):
        words = completion.split()
        shares.append(words.count(prompt.split()[0]) / max(len(words), PROMPT_WORDS))
    return shares


class LearningRateJump(TrainerCallback):
    """Multiplies the learning rate by `factor` from update `step` on, as a wrong schedule would."""

    def __init__(self, step: int, factor: float) -> None:
        self.step = step
        self.factor = factor

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise it in the optimizer, and in the scheduler, so that it lasts and is logged."""
        if state.global_step + 1 != self.step:
            return
        for group in kwargs["optimizer"].param_groups:
            group["lr"] *= self.factor
        scheduler = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])
        scheduler.base_lrs = [rate * self.factor for rate in scheduler.base_lrs]
