"""Run in one process or by torchrun: GRPO that is taken back by the guard, or resumed from the same checkpoint.

Prints one line of JSON per mode and rank: the hashes of the state after each step. Several modes, with commas between
them, are run in turn, since most of the time goes into the start of the processes.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import PrinterCallback

from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, build_dataset, build_tokenizer, reward
from trl import GRPOConfig, GRPOTrainer
from trl_runs import SetKL, patch, training_logs
from trl_state import Record

RANK = int(os.environ.get("RANK", "0"))
STEPS = 14
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
STRATEGIES = {
    "single": {},
    "ddp": {},
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        },
    },
    "zero2": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 3}}},
}


def on_a_cpu(strategy: str) -> None:
    """Let DeepSpeed use gloo, without its own operator, which would have to be compiled first."""
    if strategy.startswith("zero"):
        import deepspeed
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")


def build(strategy: str, model: str, output_dir: Path, callbacks: list) -> GRPOTrainer:
    """Return a trainer that saves every two steps."""
    settings = {**GRPO, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS, "lr_scheduler_type": "linear"}
    args = GRPOConfig(output_dir=str(output_dir), **settings, **STRATEGIES[strategy])
    if strategy == "fsdp":  # accelerate offers FSDP on accelerators only
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = GRPOTrainer(
        model=model,
        args=args,
        reward_funcs=reward,
        train_dataset=build_dataset(16),
        processing_class=build_tokenizer(),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    patch(trainer, callbacks)
    return trainer


def broken(*_: object, **__: object) -> None:
    """A fault."""
    raise OSError(28, "No space left on device")


def break_something(mode: str, guard: KLGuardCallback, trainer: GRPOTrainer) -> None:
    """On one rank only: the guard cannot be made, the start cannot be saved, the checkpoint cannot be loaded."""
    if mode == "no guard" and RANK == 0:
        guard._start = broken
    elif mode == "no start" and RANK == 0:
        guard._reentry.way.save_start = broken
    elif mode == "no save" and RANK == 0:
        trainer._save_rng_state = broken
        restore = trainer._save_rng_state

        class Repair(transformers.TrainerCallback):
            def on_step_begin(self, *_: object, **__: object) -> None:
                trainer.__dict__.pop("_save_rng_state", restore)

        trainer.add_callback(Repair())
    elif mode == "no load" and RANK == 1:
        load = trainer._load_optimizer_and_scheduler
        trainer._load_optimizer_and_scheduler = lambda checkpoint: broken() if checkpoint else load(checkpoint)


def train(mode: str, strategy: str, model: str, folder: Path) -> dict:
    """Train in one mode; return what there is to say of it."""
    record = Record()
    line: dict = {"rank": RANK, "mode": mode}
    if mode == "resume":
        trainer = record.trainer = build(strategy, model, folder / "resume", [record])
        trainer.train(resume_from_checkpoint=str(folder / "guarded" / "checkpoint-4"))
    else:
        knobs = {} if mode == "changed" else {"lr_factor": 1.0, "beta_factor": 1.0, "new_noise": False}
        guard = KLGuardCallback(action="rollback", **knobs)
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        seen_here = last == RANK
        trouble = SetKL(lambda step: 1000.0 if step >= 8 and seen_here and not guard.rollbacks else 0.01)
        trainer = record.trainer = build(strategy, model, folder / mode, [trouble, record, guard])
        guard.attach(trainer)
        break_something(mode, guard, trainer)
        trainer.train()
        line |= {
            "halted": guard.halted,
            "note": guard.decision.note,
            "rollbacks": [[d.reason.step, d.checkpoint.step, sorted(d.checkpoint.facts)] for d in guard.rollbacks],
            "rates": {row["step"]: row["learning_rate"] for row in training_logs(trainer)},
            "beta": trainer.beta,
        }
    return line | {"steps": record.steps, "states": record.states, "type": str(trainer.accelerator.distributed_type)}


def main() -> None:
    """Train as asked."""
    modes, strategy, model, folder = sys.argv[1].split(","), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    on_a_cpu(strategy)
    for mode in modes:
        print("RESULT " + json.dumps(train(mode, strategy, model, folder)) + "\n", end="", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # the destructor of a gloo group now and then waits for ever at a normal exit


if __name__ == "__main__":
    main()
