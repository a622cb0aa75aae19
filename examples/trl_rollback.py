"""A real GRPO run on a CPU whose learning rate is ten times too high: it blows up, is taken back, and ends healthy.

A slow start at a fiftieth of the rate goes well; then the rate warms up to its full height, which this task does not
bear. The guard goes back to the checkpoint from before the trouble, lowers the learning rate and raises the KL penalty,
and training goes on to its last step inside the same `trainer.train()`. The same settings with a guard that only speaks
show where they lead. Takes under a minute.

    python examples/trl_rollback.py --output-dir rollback-output
    python examples/trl_rollback.py --seeds 5     # a table, one line a seed
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Qwen2ForCausalLM

from kl_guard.journal import read_journal
from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, build_dataset, build_tokenizer, reward, save_fitted
from trl import GRPOConfig, GRPOTrainer
from trl_grpo import curve, files

STEPS = 120
RATE = 1e-2  # with this beta a constant 1e-3 is healthy
BETA = 0.3
START = 0.02  # share of the rate in the first steps
SLOW_STEPS = 40
WARMUP_STEPS = 10
LAST = 10  # logged steps that make a final KL
ALARM = 5  # logged steps that make the KL at the alarm
HEALTHY = 0.5  # nats per token: the floor of KL_BLOWUP

Rows = list[dict[str, Any]]


@dataclass
class Outcome:
    """What became of one seed: the rollbacks as (alarm, departure, target), and where both runs ended."""

    seed: int
    rollbacks: list[tuple[int, int | None, int]]
    learning_rate: float
    beta: float
    halted: bool
    steps: int
    final_kl: float
    unguarded_kl: float
    unguarded_blew_up: bool

    @property
    def as_expected(self) -> bool:
        """Whether the run was taken back and ended healthy, and would not have without the guard."""
        finished = bool(self.rollbacks) and not self.halted and self.steps == STEPS
        return finished and self.final_kl < HEALTHY < self.unguarded_kl and self.unguarded_blew_up


def share_of_rate(step: int) -> float:
    """Return the learning rate of a step as a share of its full height: a slow start, then a warm-up."""
    return max(START, min(1.0, (step - SLOW_STEPS) / WARMUP_STEPS))


def build_trainer(model: str, output_dir: Path, seed: int) -> GRPOTrainer:
    """Return a trainer with an optimizer and a schedule of its own, a checkpoint every five steps, two of them kept."""
    arguments = {**GRPO, "learning_rate": RATE, "beta": BETA, "save_strategy": "steps", "save_steps": 5}
    policy = Qwen2ForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
    trainer = GRPOTrainer(
        model=policy,
        args=GRPOConfig(output_dir=str(output_dir), max_steps=STEPS, seed=seed, save_total_limit=2, **arguments),
        reward_funcs=reward,
        train_dataset=build_dataset(seed=seed),
        processing_class=build_tokenizer(),
        optimizers=(optimizer, LambdaLR(optimizer, share_of_rate)),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def logged(trainer: GRPOTrainer) -> Rows:
    """Return the training logs of the run as it finished."""
    return [row for row in trainer.state.log_history if "loss" in row]


def abandoned(journal: Rows, attempt: int) -> Rows:
    """Return what an attempt logged; after a rollback the trainer's history does not have it any more."""
    observed = [r for r in journal if r["type"] == "observation" and r["attempt"] == attempt and "kl_mean" in r]
    return [{"step": row["step"], "kl": row["kl_mean"], "reward": row["reward"]} for row in observed]


def mean_kl(rows: Rows, last: int) -> float:
    """Return the mean KL of the last logged steps."""
    return mean(row["kl"] for row in rows[-last:])


def tell(guard: KLGuardCallback, trainer: GRPOTrainer, output_dir: Path) -> None:
    """Print what happened, attempt by attempt, and what is on disk."""
    journal, _ = read_journal(output_dir / "kl_guard" / "journal.jsonl")
    changes = {record["attempt"]: record for record in journal if record["type"] == "change"}
    for attempt, decision in enumerate(guard.rollbacks):
        reason, target, changed = decision.reason, decision.checkpoint, changes.get(attempt + 1)
        rows = abandoned(journal, attempt)
        print(f"\n--- Attempt {attempt}, until it was stopped ---")
        print(curve(rows, every=4))
        if reason is not None and target is not None:
            print(f"  decided: {decision.action} at step {reason.step} of {STEPS} by {reason.signature}")
            print(f"  onset: step {reason.onset_step}; departure: step {reason.departure_step}")
            print(f"  likeliest cause: {reason.causes[0].name}: {reason.causes[0].evidence}")
            print(f"  back to: step {target.step}, from {target.path}")
        if changed is not None:
            print(f"  changed: learning rate x{changed['learning_rate']:g}, beta x{changed['beta']:g} of the original")
        print(
            f"  KL: {mean_kl(rows, ALARM):.3f} at the alarm, {mean_kl(logged(trainer), LAST):.3f} at the end of the run"
        )
    print("\n--- The run as it finished ---")
    print(curve(logged(trainer), every=6))
    print("\nFiles:")
    print(files(output_dir))
    aside = sorted((output_dir / "kl_guard" / "quarantine").glob("*"))
    for path in [*aside, *output_dir.glob("final")]:
        print(f"  {path}")


def run(seed: int, folder: Path, *, talks: bool) -> Outcome:
    """Train with a guard that goes back, then with one that only speaks."""
    for name in ("model", "guarded", "unguarded"):
        shutil.rmtree(folder / name, ignore_errors=True)
    model = save_fitted(folder / "model", seed)

    if talks:
        print(f"\n=== GRPO run of {STEPS} steps, learning rate {RATE:g}, with action='rollback' ===", flush=True)
    output_dir = folder / "guarded"
    trainer = build_trainer(model, output_dir, seed)
    guard = KLGuardCallback(action="rollback", lr_factor=0.2, beta_factor=3.0).attach(trainer)
    trainer.train()
    if guard.halted:  # look before the model is saved or pushed: train() returns as usual after a halt
        print(f"seed {seed}: halted, so the model is not saved. {guard.decision.note}")
    else:
        trainer.save_model(str(output_dir / "final"))
    if talks:
        tell(guard, trainer, output_dir)
        print("\n=== The same settings with action='warn' ===", flush=True)

    unguarded = build_trainer(model, folder / "unguarded", seed)
    speaks = KLGuardCallback(action="warn")
    unguarded.add_callback(speaks)
    unguarded.train()
    if talks:
        print(curve(logged(unguarded), every=6))

    rows, without = logged(trainer), logged(unguarded)
    steps = [
        (decision.reason.step, decision.reason.departure_step, decision.checkpoint.step)
        for decision in guard.rollbacks
        if decision.reason is not None and decision.checkpoint is not None
    ]
    blew_up = speaks.guard is not None and any(f.signature == "KL_BLOWUP" for f in speaks.guard.findings)
    return Outcome(
        seed=seed,
        rollbacks=steps,
        learning_rate=rows[-1]["learning_rate"],
        beta=trainer.beta,
        halted=guard.halted,
        steps=trainer.state.global_step,
        final_kl=mean_kl(rows, LAST),
        unguarded_kl=mean_kl(without, LAST),
        unguarded_blew_up=blew_up,
    )


def table(outcomes: list[Outcome]) -> str:
    """Return one line a seed."""
    lines = ["seed  alarm>departure>target  learning rate   beta  halted  steps  final KL  unguarded"]
    for one in outcomes:
        where = ", ".join(f"{alarm}>{departure}>{target}" for alarm, departure, target in one.rollbacks) or "-"
        lines.append(
            f"{one.seed:4d}  {where:>22}  {one.learning_rate:13g}  {one.beta:5g}  {one.halted!s:>6}  {one.steps:5d}  "
            f"{one.final_kl:8.3f}  {one.unguarded_kl:9.3f}{'' if one.as_expected else '  NOT as expected'}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run one seed or several; return 0 when each was taken back and ended healthy, and not so without the guard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("rollback-output"))
    parser.add_argument("--seed", type=int, default=0, help="the seed, or the first of several")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many; above 1 only a table is shown")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    began = time.perf_counter()

    several = options.seeds > 1
    if several:
        logging.getLogger("kl_guard").setLevel(logging.CRITICAL)
    print("Fitting a two-layer Qwen2 to a toy task ...", flush=True)
    outcomes = []
    for seed in range(options.seed, options.seed + options.seeds):
        folder = options.output_dir / f"seed-{seed}" if several else options.output_dir
        outcomes.append(run(seed, folder, talks=not several))
        if several:
            print(table(outcomes).splitlines()[-1] if seed > options.seed else table(outcomes), flush=True)
    first = outcomes[0]
    if not several:
        print(f"\nFinal KL: {first.final_kl:.3f} as the guard left it, {first.unguarded_kl:.3f} without going back.")
    good = sum(one.as_expected for one in outcomes)
    verdict = "As expected" if good == len(outcomes) else "NOT as expected"
    count = f" ({good} of {len(outcomes)} seeds)" if several else ""
    print(f"{verdict}{count}, in {time.perf_counter() - began:.0f} s.")
    return 0 if good == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
