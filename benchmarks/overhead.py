"""What the guard adds to the wall time of a healthy GRPO run: real runs of TRL with it and without it, in turn.

    python benchmarks/overhead.py [--pairs 7] [--steps 40]

The runs save every 10 steps and log every step; the guarded ones are ready to go back (`action="rollback"`, attached),
with everything that this needs: pins, checksums, the state before the first step. The model is small, but large enough
that a step takes some tenths of a second on one core. Measured is `trainer.train()`, of which a first pair is not
counted. Each pair must end with equal weights and without a halt. Exit status 1 when the median ratio is above 1.03.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from kl_guard_trl import KLGuardCallback

sys.path.append(str(Path(__file__).parent.parent / "examples"))

tiny_task = importlib.import_module("tiny_task")

LIMIT = 1.03
FEWEST = 5
SAVE_STEPS = 10
ANSWER_TOKENS = 32
WORTH_A_LINE = 1e-4  # seconds


@dataclass
class Run:
    """What one run took, in seconds, and what it ended with."""

    seconds: float
    cpu: float
    weights: list[torch.Tensor]
    hooks: dict[str, float] = field(default_factory=dict)


class Messages(logging.Handler):
    """Keeps what the guard logs, instead of printing it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    def take(self) -> list[logging.LogRecord]:
        """Return what has been kept since the last call."""
        taken, self.records = self.records, []
        return taken


def save_model(folder: Path) -> str:
    """Save a four-layer Qwen2 of some two million parameters with random weights, and its tokenizer."""
    tokenizer = tiny_task.build_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def train(model: str, output_dir: Path, steps: int, messages: Messages, *, guarded: bool) -> Run:
    """Make one run; raise AssertionError when it was not healthy or the guard did not do its work."""
    arguments = {
        **tiny_task.GRPO,
        "learning_rate": 1e-5,
        "max_completion_length": ANSWER_TOKENS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
    }
    trainer: Any = GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=str(output_dir), max_steps=steps, seed=0, **arguments),
        reward_funcs=tiny_task.reward,
        train_dataset=tiny_task.build_dataset(),
        processing_class=tiny_task.build_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    guard = KLGuardCallback(action="rollback").attach(trainer) if guarded else None
    hooks = time_hooks(guard) if guard is not None else {}
    gc.collect()
    cpu, began = time.process_time(), time.perf_counter()
    trainer.train()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu

    check(trainer.state.global_step == steps, f"the run ended at step {trainer.state.global_step}")
    if guard is not None:
        faults = [record.getMessage() for record in messages.records if record.levelno >= logging.ERROR]
        check(not faults, f"the guard had a fault: {faults}")
        check(not guard.halted and not guard.rollbacks, "the guard stopped a healthy run")
        check(guard.guard is not None and not guard.guard.findings, "the guard found something in a healthy run")
        pins = list((output_dir / "kl_guard" / "pins").glob("step-*"))
        check(len(pins) >= min(2, steps // SAVE_STEPS), f"the guard has pinned nothing but {pins}")
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return Run(seconds, cpu, weights, dict(hooks))


def time_hooks(guard: KLGuardCallback) -> dict[str, float]:
    """Wrap all that the trainer calls in a callback; return the seconds spent in each, which grow as it trains."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    for name in dir(guard):
        if name.startswith("on_"):
            setattr(guard, name, timed(name, getattr(guard, name)))
    return spent


def check(holds: bool, text: str) -> None:
    """Raise AssertionError with this text, also where `python -O` leaves out assertions."""
    if not holds:
        raise AssertionError(text)


def measure(model: str, folder: Path, steps: int, messages: Messages, *, guarded_first: bool) -> tuple[Run, Run]:
    """Return a guarded run and an unguarded one, made one after the other in folders of their own."""
    runs: dict[bool, Run] = {}
    for guarded in (guarded_first, not guarded_first):
        with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as output_dir:
            runs[guarded] = train(model, Path(output_dir), steps, messages, guarded=guarded)
    pairs = zip(runs[True].weights, runs[False].weights, strict=True)
    check(all(torch.equal(a, b) for a, b in pairs), "the guarded run ended with other weights")
    return runs[True], runs[False]


def by_hook(runs: list[dict[str, float]], whole: float) -> Iterator[str]:
    """Yield a line for each hook that takes part in the cost, the costliest first: median seconds, share of `whole`."""
    totals = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in sorted(set().union(*runs))}
    totals["all"] = statistics.median(sum(run.values()) for run in runs)
    for name, spent in sorted(totals.items(), key=lambda item: item[1], reverse=True):
        if spent >= WORTH_A_LINE:
            yield f"{name:<24} {spent * 1e3:>8.1f} ms {spent / whole:>7.2%}"


def main() -> int:
    """Print every pair and the median ratio; return 1 when that is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help=f"at least {FEWEST}")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to work")
    options = parser.parse_args()
    if options.pairs < FEWEST:
        parser.error(f"--pairs must be at least {FEWEST}, got {options.pairs}")
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    warnings.simplefilter("ignore")
    silence: Any = transformers.logging  # without types
    silence.set_verbosity_error()
    silence.disable_progress_bar()
    torch.set_num_threads(1)
    logger, messages = logging.getLogger("kl_guard"), Messages()
    logger.addHandler(messages)
    logger.propagate = False

    pairs: list[tuple[Run, Run]] = []
    with tempfile.TemporaryDirectory(prefix="kl-guard-", dir=options.folder) as name:
        folder = Path(name)
        model = save_model(folder / "model")
        for number in range(options.pairs + 1):
            guarded, unguarded = measure(model, folder, options.steps, messages, guarded_first=number % 2 == 1)
            said = messages.take()
            if number == 0:
                print("\n".join(record.getMessage() for record in said))
                print(f"\n{'pair':>4} {'guarded':>9} {'unguarded':>9} {'ratio':>7}", flush=True)
                continue
            pairs.append((guarded, unguarded))
            ratio = guarded.seconds / unguarded.seconds
            print(f"{number:>4} {guarded.seconds:>7.2f} s {unguarded.seconds:>7.2f} s {ratio:>7.3f}", flush=True)

    whole = statistics.median(unguarded.seconds for _, unguarded in pairs)
    print(f"\nA step without the guard takes {whole / options.steps:.2f} s. Of {whole:.2f} s the guard's hooks take:\n")
    for line in by_hook([guarded.hooks for guarded, _ in pairs], whole):
        print(line)
    ratio = statistics.median(guarded.seconds / unguarded.seconds for guarded, unguarded in pairs)
    fastest = min(guarded.seconds for guarded, _ in pairs) / min(unguarded.seconds for _, unguarded in pairs)
    cpu = statistics.median(guarded.cpu / unguarded.cpu for guarded, unguarded in pairs)
    kept = ratio <= LIMIT
    print(f"\nMedian ratio {ratio:.3f} (of the fastest runs {fastest:.3f}, of CPU times {cpu:.3f}); ", end="")
    print(f"limit {LIMIT}: {'kept' if kept else 'NOT kept'}.")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
