"""Run by torchrun: GRPO on two gloo ranks of which one alone sees the trouble, or one has a broken guard.

Prints one line of JSON per repetition and rank: the step at which training ended, and what the guard said. Several
modes, with commas between them, are run in turn, since most of the time goes into the start of the processes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import PrinterCallback

from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, build_dataset, build_tokenizer, reward
from trl import GRPOConfig, GRPOTrainer
from trl_runs import SetKL, patch

RANK = int(os.environ.get("RANK", "0"))
STEPS = 14


def build(model: str, output_dir: Path, callbacks: list) -> GRPOTrainer:
    """Return a trainer that saves and logs at every step."""
    settings = {**GRPO, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": STEPS}
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=str(output_dir), **settings),
        reward_funcs=reward,
        train_dataset=build_dataset(16),
        processing_class=build_tokenizer(),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    patch(trainer, callbacks)
    return trainer


def break_guard(guard: KLGuardCallback) -> None:
    """Make every observation of this rank's guard raise."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("inserted")

    guard._observe = broken


def main() -> None:
    """Repeat the run of each mode as often as asked."""
    modes, model, parent, repeats = sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for mode, repeat in itertools.product(modes, range(repeats)):
        folder = parent / mode
        rng = random.Random(repeat)  # the same on both ranks
        seer, begin = rng.randrange(2), rng.randrange(2, 9)
        guard = KLGuardCallback(save_halted=repeat % 2 == 0)
        sees = seer == RANK
        set_kl = SetKL(lambda step, sees=sees, begin=begin: 1000.0 if sees and step >= begin else 0.01)
        trainer = build(model, folder / str(repeat), [set_kl, guard])
        if mode == "fault" and not sees:
            break_guard(guard)
        trainer.train()
        reason = guard.decision.reason
        line = {
            "mode": mode,
            "repeat": repeat,
            "rank": RANK,
            "seer": seer,
            "expected": begin + 2,
            "ended": trainer.state.global_step,
            "halted": guard.halted,
            "reason": reason and [reason.signature, reason.step],
            "departure": reason and reason.departure_step,
            "way_back": guard.decision.checkpoint and guard.decision.checkpoint.step,
            "output_dir": trainer.args.output_dir == str(folder / str(repeat)),
        }
        print("RESULT " + json.dumps(line) + "\n", end="", flush=True)
    torch.distributed.barrier()
    os._exit(0)  # the destructor of a gloo group now and then waits for ever at a normal exit


if __name__ == "__main__":
    main()
