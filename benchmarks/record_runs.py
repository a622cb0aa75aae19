"""Record the project's own labelled series: real GRPO runs of the toy task, healthy or broken on purpose.

    python benchmarks/record_runs.py benchmarks/runs

Writes `labels.csv` and `series/<id>.csv` in the form that `detection.py` reads, some ten minutes on two cores. What a
run must be called follows from what was done to it, and from its KL at the end, never from a detector:

- `critical` is `no` where nothing was done, or only single steps were disturbed. It is `yes` where something was done
  and KL is not finite, or has blown up: the median of the last 20 is above 1 nat per token and 8 times what it was
  in the 20 steps before, and it was above 1 within 50 steps. It is `either` where it was not that bad.
- `cause_step` is the first update with the wrong setting.
- `latest` is 20 steps after the median of 5 first is above 1 nat per token; 5 after the first value that is not finite.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

sys.path.append(str(Path(__file__).parent.parent / "examples"))

tiny_task = importlib.import_module("tiny_task")

COLUMNS = ("step", "kl", "reward", "reward_std", "entropy", "grad_norm", "learning_rate", "loss")
FAR = 1.0  # nats per token
RATIO = 8.0
SOON = 50
GRACE = 20


@dataclass(frozen=True)
class Plan:
    """A run: what is set from the start, what happens in it, and from which update on it is wrong (None: never)."""

    id: str
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewards: Callable[..., Any] = tiny_task.reward
    happening: Callable[[GRPOTrainer], TrainerCallback] | None = None
    cause: str = ""
    cause_step: int | None = None


def policy(trainer: GRPOTrainer) -> Any:
    """Return the policy."""
    return trainer.model


def reference(trainer: GRPOTrainer) -> Any:
    """Return the reference model."""
    return trainer.ref_model


class BetaDrop(TrainerCallback):
    """Takes the penalty away from update `step` on."""

    def __init__(self, trainer: GRPOTrainer, step: int) -> None:
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set it."""
        if state.global_step + 1 == self.step:
            self.trainer.beta = 1e-6


class Disturbed(TrainerCallback):
    """Adds noise to the policy's weights for single updates, and takes it away again."""

    def __init__(self, trainer: GRPOTrainer, steps: Sequence[int], size: float) -> None:
        self.trainer, self.steps, self.size = trainer, steps, size
        self.noise: list[torch.Tensor] = []

    @torch.no_grad()
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Disturb."""
        if state.global_step + 1 in self.steps:
            parameters = list(policy(self.trainer).parameters())
            self.noise = [self.size * torch.randn_like(p) * p.std() for p in parameters]
            for parameter, noise in zip(parameters, self.noise, strict=True):
                parameter.add_(noise)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put right."""
        if self.noise:
            for parameter, noise in zip(policy(self.trainer).parameters(), self.noise, strict=True):
                parameter.sub_(noise)
            self.noise = []


class Overflow(TrainerCallback):
    """Lets a weight of the reference overflow at update `step`, as half precision does."""

    def __init__(self, trainer: GRPOTrainer, step: int) -> None:
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Overflow."""
        if state.global_step + 1 == self.step:
            reference(self.trainer).get_output_embeddings().weight.data[5] = math.inf


class Recorder(TrainerCallback):
    """Keeps what the trainer logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep one log."""
        if logs and "loss" in logs:
            logged = {name: logs.get(name) for name in COLUMNS[1:]}
            kl = math.nan if logged["kl"] is None else logged["kl"]  # TRL leaves a mean out that is NaN
            self.rows.append({"step": state.global_step, **logged, "kl": kl})


def _jump(trainer: GRPOTrainer, step: int) -> Any:
    return tiny_task.LearningRateJump(step=step, factor=100.0)


def one_word(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return a reward that a single word earns, which a penalty has to hold."""
    return [completion.split().count("w0") / tiny_task.GRPO["max_completion_length"] for completion in completions]


def length(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return a reward for long completions."""
    return [len(completion.split()) / tiny_task.GRPO["max_completion_length"] for completion in completions]


def plans() -> list[Plan]:
    """Return what is run."""
    healthy = [
        Plan("healthy_first_word_0", 300, {"beta": 0.1}),
        Plan("healthy_first_word_1", 300, {"beta": 0.04, "seed": 1}),
        Plan("healthy_one_word_0", 300, {"beta": 0.5, "learning_rate": 2e-4}, one_word),
        Plan("healthy_one_word_1", 300, {"beta": 0.3, "learning_rate": 2e-4, "seed": 1}, one_word),
        Plan("healthy_length_0", 300, {"beta": 0.3, "learning_rate": 2e-4}, length),
        Plan("healthy_off_policy_0", 300, {"beta": 0.1, "num_iterations": 4}),
        Plan("healthy_warm_up_0", 300, {"beta": 0.1, "learning_rate": 1e-4, "warmup_steps": 30, "seed": 2}),
        Plan("healthy_long_0", 1000, {"beta": 0.5, "learning_rate": 1e-4}, one_word),
    ]
    disturbed = [
        Plan(
            f"disturbed_{seed}",
            250,
            {"seed": seed},
            happening=partial(Disturbed, steps=(60, 130, 131), size=0.5),
            cause="weights disturbed for single updates",
        )
        for seed in range(2)
    ]
    jumps = [
        Plan(
            f"rate_jump_{step}",
            step + 70,
            {"beta": 0.02, "learning_rate": 1e-4, "seed": seed},
            happening=partial(_jump, step=step),
            cause="learning rate x 100",
            cause_step=step,
        )
        for seed, step in enumerate((60, 120, 200, 500))
    ]
    loose = [
        Plan(
            f"no_penalty_{seed}",
            200,
            {"beta": 1e-6, "learning_rate": 1e-3, "seed": seed},
            one_word if seed < 2 else length,
            cause="beta 1e-6",
            cause_step=1,
        )
        for seed in range(3)
    ]
    drops = [
        Plan(
            f"penalty_drop_{step}",
            step + 120,
            {"beta": 0.3, "learning_rate": 1e-3, "seed": seed},
            one_word,
            partial(BetaDrop, step=step),
            "beta from 0.3 to 1e-6",
            step,
        )
        for seed, step in enumerate((100, 250))
    ]
    overflows = [
        Plan(
            f"overflow_{step}",
            step + 20,
            {"seed": seed},
            happening=partial(Overflow, step=step),
            cause="a weight of the reference overflows",
            cause_step=step,
        )
        for seed, step in enumerate((40, 150))
    ]
    return [*healthy, *disturbed, *jumps, *loose, *drops, *overflows]


def record(plan: Plan, fitted: str) -> list[dict[str, Any]]:
    """Train a run, to its end or until it breaks; return what was logged."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=fitted,
            args=GRPOConfig(output_dir=folder, max_steps=plan.steps, **{**tiny_task.GRPO, "seed": 0, **plan.settings}),
            reward_funcs=plan.rewards,
            train_dataset=tiny_task.build_dataset(),
            processing_class=tiny_task.build_tokenizer(),
        )
        recorder = Recorder()
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(recorder)
        if plan.happening is not None:
            trainer.add_callback(plan.happening(trainer))
        try:
            trainer.train()
        except RuntimeError as error:  # weights that are no numbers cannot be sampled from
            print(f"  broke at step {trainer.state.global_step}: {error}")
        return recorder.rows


def label(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the label of a recorded run; see the module."""
    kl = [float(row["kl"]) for row in rows]
    broken = next((i for i, value in enumerate(kl) if not math.isfinite(value)), None)
    cause = len(kl) if plan.cause_step is None else plan.cause_step - 1
    far = next((i for i in range(cause + 4, len(kl)) if statistics.median(kl[i - 4 : i + 1]) > FAR), None)
    before = statistics.median(kl[max(0, cause - 20) : cause] or [0.0])
    end = statistics.median(kl[-20:])
    blown_up = far is not None and far - cause <= SOON and end > max(FAR, RATIO * before)
    latest = None
    if plan.cause_step is not None and broken is not None:
        latest = int(rows[broken]["step"]) + 5
    elif blown_up and far is not None:
        latest = int(rows[far]["step"]) + GRACE
    wrong = plan.cause_step is not None
    return {
        "id": plan.id,
        "critical": "no" if not wrong else "yes" if latest is not None else "either",
        "cause": plan.cause if wrong else "",
        "cause_step": plan.cause_step if wrong else "",
        "latest": "" if latest is None else latest,
        "n": len(rows),
        "note": plan.cause,
    }


def main() -> None:
    """Record all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--labels", action="store_true", help="write the labels of what is recorded already")
    options = parser.parse_args()
    (options.folder / "series").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    labels = []
    with tempfile.TemporaryDirectory() as folder:
        fitted = "" if options.labels else tiny_task.save_fitted(folder)
        for plan in plans():
            path = options.folder / "series" / f"{plan.id}.csv"
            if not options.labels:
                write(path, record(plan, fitted))
            with path.open(newline="") as file:
                labels.append(label(plan, list(csv.DictReader(file))))
            print(labels[-1], flush=True)
    write(options.folder / "labels.csv", labels)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV; floats in six digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in row.values()] for row in rows)


if __name__ == "__main__":
    main()
