"""A GRPO run that trackio tracks and the guard halts; prints one line of JSON. In a process of its own, since where
trackio keeps its data is settled when it is imported.
"""  # noqa: D205

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


def main() -> None:
    """Train the model of the first argument, in the folder of the second."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    guard = KLGuardCallback(action=sys.argv[3])
    callbacks = [SetKL(lambda step: 0.01 if step <= 5 else 1000.0 + step), guard]
    settings = {**GRPO, "report_to": "trackio", "project": "guarded", "trackio_space_id": None, "max_steps": 12}
    known = GRPOConfig.__dataclass_fields__
    trainer = GRPOTrainer(
        model=sys.argv[1],
        args=GRPOConfig(output_dir=sys.argv[2], **{name: value for name, value in settings.items() if name in known}),
        reward_funcs=reward,
        train_dataset=build_dataset(16),
        processing_class=build_tokenizer(),
        callbacks=callbacks,
    )
    patch(trainer, callbacks)
    trainer.train()
    from trackio import api

    (run,) = api.Api().runs("guarded")
    line = {"halted": guard.halted, "alerts": run.alerts(), "reports": [*map(str, Path(sys.argv[2]).rglob("*.html"))]}
    print("RESULT " + json.dumps(line) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
