"""GRPO runs that trackio tracks, one for each action of the guard; prints a line of JSON for each.

In a process of its own, since where trackio keeps its data is settled when it is imported.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers

from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, build_dataset, build_tokenizer, reward
from trl import GRPOConfig, GRPOTrainer
from trl_runs import SetKL, patch


def train(model: str, folder: Path, action: str) -> dict:
    """Train in a project of its own; return what the tracker knows of it."""
    guard = KLGuardCallback(action=action)
    callbacks = [SetKL(lambda step: 0.01 if step <= 5 else 1000.0 + step), guard]
    settings = {**GRPO, "report_to": "trackio", "project": action, "trackio_space_id": None, "max_steps": 12}
    known = GRPOConfig.__dataclass_fields__
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=str(folder), **{name: value for name, value in settings.items() if name in known}),
        reward_funcs=reward,
        train_dataset=build_dataset(16),
        processing_class=build_tokenizer(),
        callbacks=callbacks,
    )
    patch(trainer, callbacks)
    trainer.train()
    from trackio import api

    (run,) = api.Api().runs(action)
    reports = [*map(str, folder.rglob("*.html"))]
    return {"action": action, "halted": guard.halted, "alerts": run.alerts(), "reports": reports}


def main() -> None:
    """Train the model of the first argument, in the folder of the second, with each action that follows."""
    model, folder, actions = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for action in actions:
        print("RESULT " + json.dumps(train(model, folder / action, action)) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
