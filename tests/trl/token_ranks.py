"""Run by torchrun: GRPO on two gloo ranks with an attached guard, for each number of micro-batches that is given.

Prints one line of JSON per run and rank.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import PrinterCallback

from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, build_dataset, build_tokenizer, reward
from trl import GRPOConfig, GRPOTrainer
from trl_runs import training_logs


def train(model: str, folder: Path, batches: int) -> dict:
    """Train six steps; return what the guard has seen."""
    rank = int(os.environ["RANK"])
    settings = {**GRPO, "per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": batches}
    settings |= {"learning_rate": 3e-3, "max_steps": 6}
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=str(folder), **settings),
        reward_funcs=reward,
        train_dataset=build_dataset(32),
        processing_class=build_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    guard = KLGuardCallback().attach(trainer)
    trainer.train()
    stats = guard.guard.outliers.latest
    return {
        "batches": batches,
        "rank": rank,
        "observed": list(guard.guard.history.column("kl_mean")),
        "logged": [row["kl"] for row in training_logs(trainer)],
        "tokens": stats.tokens,
        "ranks": sorted({outlier.rank for outlier in stats.outliers}),
        "written": len((folder / "kl_guard" / "tokens.jsonl").read_text().splitlines()) if rank == 0 else 0,
    }


def main() -> None:
    """Train, and say what the guard has seen."""
    model, folder, counts = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for count in counts:
        print("RESULT " + json.dumps(train(model, folder / count, int(count))) + "\n", end="", flush=True)
    torch.distributed.barrier()
    os._exit(0)  # the destructor of a gloo group now and then waits for ever at a normal exit


if __name__ == "__main__":
    main()
