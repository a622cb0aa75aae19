"""Two real GRPO runs on a CPU under the guard: one healthy, one whose learning rate is raised mid-run.

The healthy run passes in silence. The other one blows up and is halted; the last checkpoint from before the trouble,
the halted state and the incident are on disk. Takes under a minute.

    python examples/trl_grpo.py --output-dir demo-output
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import PrinterCallback

from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, LearningRateJump, build_dataset, build_tokenizer, reward, save_fitted
from trl import GRPOConfig, GRPOTrainer

STEPS = 90
JUMP_AT = 45
JUMP_BY = 100.0
BAR = 46


def train(model: str, output_dir: Path, seed: int, *extra: Any) -> tuple[KLGuardCallback, list[dict[str, Any]]]:
    """Train a GRPO run with the guard attached; return the callback and the training logs."""
    arguments = {**GRPO, "learning_rate": 1e-4, "save_strategy": "steps", "save_steps": 10, "save_total_limit": 3}
    guard = KLGuardCallback()
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=str(output_dir), max_steps=STEPS, seed=seed, **arguments),
        reward_funcs=reward,
        train_dataset=build_dataset(seed=seed),
        processing_class=build_tokenizer(),
        callbacks=list(extra),
    )
    trainer.remove_callback(PrinterCallback)
    guard.attach(trainer)
    trainer.train()
    return guard, [row for row in trainer.state.log_history if "loss" in row]


def curve(rows: list[dict[str, Any]], every: int = 3) -> str:
    """Return KL over steps as text: a bar per logged step, on a log scale from 0.001 to 10 nats per token."""
    block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    lines = ["  step      kl  reward   0.001     0.01       0.1        1         10"]
    for row in rows[::every] + (rows[-1:] if (len(rows) - 1) % every else []):
        share = (math.log10(max(row["kl"], 1e-3)) + 3) / 4
        bar = block * round(BAR * min(share, 1.0))
        lines.append(f"  {row['step']:4d} {row['kl']:7.4f}  {row['reward']:6.3f}   {bar}")
    return "\n".join(lines)


def files(folder: Path) -> str:
    """Return what lies in a run's folder: checkpoints, and what the guard keeps."""
    patterns = (
        "checkpoint-*",
        "kl_guard/journal.jsonl",
        "kl_guard/tokens.jsonl",
        "kl_guard/incidents/*/*",
        "kl_guard/pins/*",
        "kl_guard/halted/*",
    )
    return "\n".join(f"  {path}" for pattern in patterns for path in sorted(folder.glob(pattern)))


def main() -> int:
    """Run both trainings; return 0 when the healthy one passed and the other one was halted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("demo-output"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    began = time.perf_counter()

    out: Path = options.output_dir
    for name in ("model", "healthy", "blow-up"):
        shutil.rmtree(out / name, ignore_errors=True)
    print("Fitting a two-layer Qwen2 to a toy task ...", flush=True)
    model = save_fitted(out / "model", options.seed)

    print(f"\n=== Healthy GRPO run, {STEPS} steps ===", flush=True)
    healthy, rows = train(model, out / "healthy", options.seed)
    print(curve(rows))
    print(f"  halted: {healthy.halted}; findings: {len(healthy.guard.findings) if healthy.guard else 0}")

    print(f"\n=== GRPO run whose learning rate is raised x{JUMP_BY:g} at step {JUMP_AT} ===", flush=True)
    broken, rows = train(model, out / "blow-up", options.seed, LearningRateJump(JUMP_AT, JUMP_BY))
    print(curve(rows))
    reason = broken.decision.reason
    if reason is not None:
        print(f"  halted at step {reason.step} of {STEPS} by {reason.signature}: {reason.message}")
        print(f"  onset: step {reason.onset_step}; departure: step {reason.departure_step} (cause: step {JUMP_AT})")
        print(f"  likeliest cause: {reason.causes[0].name}: {reason.causes[0].evidence}")
    if broken.guard is not None and broken.guard.outliers.latest is not None:
        worst = broken.guard.outliers.latest.outliers[0]
        print(
            f"  the token with the largest KL: {worst.text} at position {worst.position} behind {worst.prompt!r}: "
            f"log-prob {worst.policy_logprob:.2f} by the policy, {worst.ref_logprob:.2f} by the reference"
        )
    if broken.decision.checkpoint is not None:
        print(f"  go back to: {broken.decision.checkpoint.path}")
    print("\nFiles of the halted run:")
    print(files(out / "blow-up"))

    passed = not healthy.halted and broken.halted
    print(f"\n{'As expected' if passed else 'NOT as expected'}, in {time.perf_counter() - began:.0f} s.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
