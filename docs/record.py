"""Records the runs behind the pictures of the documentation: real ones, tiny, on a CPU, each wrong in one way.

    python docs/record.py                 # all of them, some two minutes
    python docs/record.py kl_frozen       # one of them

Writes `docs/data/<name>.csv`: a row per step, in the guard's own names, so that `kl-guard replay` reads it. What was
done to each run is the docstring of its function; those of `tests/wrong_runs.py` are the runs that the tests train.
"""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from transformers import PrinterCallback

import wrong_runs
from kl_guard import GuardConfig, KLGuard
from kl_guard.journal import read_journal
from kl_guard.observation import METRICS
from kl_guard.tokens import per_token_kl
from kl_guard_trl import KLGuardCallback
from raw_grpo_loss import GROUP, group_advantages, grpo_loss, logprobs_of, naive_loss, sample
from tiny_task import GRPO, LearningRateJump, build_dataset, build_tokenizer, prompts, reward, save_fitted
from trl import GRPOConfig, GRPOTrainer

DATA = Path(__file__).parent / "data"
Rows = list[dict[str, Any]]


def save(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as `docs/data/<name>.csv`; what is missing everywhere has no column."""
    rows = [{key: value for key, value in row.items() if value is not None and key != "window"} for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (DATA / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_short(column, row.get(column)) for column in columns])


def _short(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "reference_checksum":
        return repr(float(value))  # a small change must show
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def observed(guard: KLGuard | None) -> Rows:
    """Return what a guard observed."""
    assert guard is not None
    return [asdict(observation) for observation in guard.history]


def attempts(folder: Path) -> Rows:
    """Return what a run observed before and after going back, by attempt."""
    journal, _ = read_journal(folder / "kl_guard" / "journal.jsonl")
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for record in journal:
        if record["type"] == "observation":  # a step may be told in parts
            known = {name: record[name] for name in (*METRICS, "attempt", "step") if name in record}
            rows.setdefault((record["attempt"], record["step"]), {}).update(known)
    return list(rows.values())


# Runs of TRL's GRPOTrainer.


def _grpo(
    fitted: str,
    folder: Path,
    *,
    rewards: Any = reward,
    callbacks: Any = (),
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    **arguments: Any,
) -> GRPOTrainer:
    trainer = trainer_class(
        model=fitted,
        args=GRPOConfig(output_dir=str(folder), seed=0, **{**GRPO, **arguments}),
        reward_funcs=rewards,
        train_dataset=build_dataset(),
        processing_class=build_tokenizer(),
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _watched(trainer: GRPOTrainer, **options: Any) -> KLGuardCallback:
    guard = KLGuardCallback(**{"action": "warn", **options}).attach(trainer)
    trainer.train()
    return guard


def _wrong(kind: str, max_steps: int | None = None) -> Callable[[str, Path], Rows]:
    def record(fitted: str, folder: Path) -> Rows:
        return observed(wrong_runs.run(kind, fitted, folder, seed=0, max_steps=max_steps).guard)

    record.__doc__ = f"`tests/wrong_runs.py`, kind {kind!r}"
    return record


def kl_blowup(fitted: str, folder: Path) -> Rows:
    """The learning rate is raised from 1e-4 to 1e-2 at step 45, as in `examples/trl_grpo.py`; the guard only speaks."""
    jump = LearningRateJump(45, 100.0)
    trainer = _grpo(fitted, folder, callbacks=[jump], learning_rate=1e-4, max_steps=90)
    return observed(_watched(trainer).guard)


def healthy(fitted: str, folder: Path) -> Rows:
    """The same run with its learning rate left alone."""
    return observed(_watched(_grpo(fitted, folder, learning_rate=1e-4, max_steps=90)).guard)


def kl_growth(fitted: str, folder: Path) -> Rows:
    """A reward that one word earns, and a beta of 1e-6 that holds nobody back; learning rate 2e-4."""
    arguments = {"beta": 1e-6, "learning_rate": 2e-4, "max_steps": 120}
    return observed(_watched(_grpo(fitted, folder, rewards=wrong_runs._one_word, **arguments)).guard)


def kl_plateau(fitted: str, folder: Path) -> Rows:
    """A learning rate of 1e-2 from the first step on, gradients hardly clipped."""
    arguments = {"beta": 0.04, "learning_rate": 1e-2, "max_steps": 80, "max_grad_norm": 100.0}
    return observed(_watched(_grpo(fitted, folder, **arguments)).guard)


def padding_in_mask(fitted: str, folder: Path) -> Rows:
    """The mask of completions is 1 behind their end too; the guard only speaks."""
    trainer = _grpo(fitted, folder, trainer_class=wrong_runs._CountsPadding, max_steps=30)
    return observed(_watched(trainer).guard)


def kl_missing(fitted: str, folder: Path) -> Rows:
    """Beta 0, TRL's default: no reference model, no KL."""
    return observed(_watched(_grpo(fitted, folder, beta=0.0, max_steps=40)).guard)


def reference_reset(fitted: str, folder: Path) -> Rows:
    """Stopped at step 40 and resumed with `model=` set to the checkpoint, so that the reference is made from it too."""
    arguments = {"learning_rate": 1e-3, "beta": 0.04, "save_strategy": "steps", "save_steps": 40}
    before = observed(_watched(_grpo(fitted, folder, max_steps=40, **arguments)).guard)
    checkpoint = str(folder / "checkpoint-40")
    trainer = _grpo(checkpoint, folder, max_steps=70, **arguments)
    guard = KLGuardCallback(action="warn").attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    after = [row for row in observed(guard.guard) if row["step"] > 40]
    return [{"attempt": 0, **row} for row in before] + [{"attempt": 1, **row} for row in after]


def rollback(fitted: str, folder: Path) -> Rows:
    """`examples/trl_rollback.py`: ten times the learning rate that the task bears, and `action="rollback"`."""
    import trl_rollback

    trainer = trl_rollback.build_trainer(fitted, folder, seed=0)
    _watched(trainer, action="rollback", lr_factor=0.2, beta_factor=3.0)
    return attempts(folder)


def unguarded(fitted: str, folder: Path) -> Rows:
    """The same settings with a guard that only speaks."""
    import trl_rollback

    return observed(_watched(trl_rollback.build_trainer(fitted, folder, seed=0)).guard)


# Runs of a plain torch loop, `examples/raw_grpo_loss.py` with one thing wrong.


def _rewards(asked: list[str], completions: list[str]) -> torch.Tensor:
    return torch.tensor(reward(asked, completions))


def _loop(
    fitted: str,
    *,
    steps: int,
    learning_rate: float = 1e-3,
    beta: float = 0.05,
    estimator: str = "k3",
    stale_sampler: bool = False,
    clamp: float | None = None,
    rewards_of: Callable[[list[str], list[str]], torch.Tensor] = _rewards,
    mask_truncated: bool = False,
    wrong_optimizer: bool = False,
    mixed_up_at: Collection[int] = (),
    next_beta: Callable[[float, float], float] | None = None,
) -> Rows:
    """Train the toy policy; return what a loop would log."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    policy = transformers.Qwen2ForCausalLM.from_pretrained(fitted)
    reference = copy.deepcopy(policy).requires_grad_(False)
    trained = copy.deepcopy(policy) if wrong_optimizer else policy
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate)
    rows: Rows = []
    for step in range(1, steps + 1):
        texts = prompts(2, seed=step)
        with torch.no_grad():
            ids, attention, start, mask = sample(reference if stale_sampler else policy, tokenizer, texts)
            by_reference = logprobs_of(reference, ids, attention, start)
            if step in mixed_up_at:
                by_reference = by_reference.roll(1, 0)
        completions = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        if mask_truncated:
            mask &= (ids[:, start:] == tokenizer.eos_token_id).any(1, keepdim=True)
        rewards = rewards_of([text for text in texts for _ in range(GROUP)], completions)
        by_policy = logprobs_of(policy, ids, attention, start)
        loss = grpo_loss(by_policy, by_policy.detach(), by_reference, group_advantages(rewards), mask, beta=beta)
        if mask_truncated:  # with a penalty as it is often written, which divides by the number of tokens, 0 or not
            loss = loss + naive_loss(by_policy, by_reference, mask, beta)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        kl = per_token_kl(by_policy.detach(), by_reference, estimator)[mask]
        if clamp is not None:
            kl = kl.clamp(-clamp, clamp)
        rows.append(
            {
                "step": step,
                "kl_mean": kl.mean().item(),
                "kl_max": kl.max().item() if len(kl) else math.nan,
                "reward": rewards.mean().item(),
                "reward_std": rewards.std().item(),
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "learning_rate": learning_rate,
                "beta": beta,
            }
        )
        if next_beta is not None:
            beta = next_beta(beta, rows[-1]["kl_mean"])
        if not all(torch.isfinite(parameter).all() for parameter in policy.parameters()):
            break  # there is nothing left to sample from
    return rows


def kl_negative(fitted: str, folder: Path) -> Rows:
    """The sampler never gets new weights; the loop logs k1."""
    return _loop(fitted, steps=80, learning_rate=3e-3, beta=0.0, estimator="k1", stale_sampler=True)


def kl_nonfinite(fitted: str, folder: Path) -> Rows:
    """Completions that were cut off are masked, the reward likes long ones, and the mean over no token is 0/0."""

    def long_ones(asked: list[str], completions: list[str]) -> torch.Tensor:
        return torch.tensor([float(len(completion.split())) for completion in completions])

    return _loop(fitted, steps=120, learning_rate=1e-4, beta=0.1, rewards_of=long_ones, mask_truncated=True)


def kl_spikes(fitted: str, folder: Path) -> Rows:
    """At steps 30, 47 and 61 the reference's log-probs come back in another order than the completions went out."""
    return _loop(fitted, steps=80, learning_rate=3e-4, mixed_up_at={30, 47, 61})


def beta_runaway(fitted: str, folder: Path) -> Rows:
    """Beta is doubled after each step whose KL is above a target of 0.001, with no bound."""
    return _loop(fitted, steps=80, beta=0.05, next_beta=lambda beta, kl: beta * 2.0 if kl > 0.001 else beta / 2.0)


def kl_saturated(fitted: str, folder: Path) -> Rows:
    """A learning rate that is too high, and per-token KL clamped to 10 before it is logged, as some frameworks do."""
    return _loop(fitted, steps=80, learning_rate=1e-2, beta=1e-6, clamp=10.0)


def kl_frozen(fitted: str, folder: Path) -> Rows:
    """The optimizer holds the parameters of a copy: gradients come, and nothing moves."""
    return _loop(fitted, steps=30, wrong_optimizer=True)


def restored_kl_high(fitted: str, folder: Path) -> Rows:
    """The loop loads its newest checkpoint when the guard asks for an earlier one."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    policy = transformers.Qwen2ForCausalLM.from_pretrained(fitted)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4)
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=folder, announce=False)
    newest: dict[str, Any] = {}
    step = 0
    while step < 80 and guard.attempt < 2:
        step += 1
        texts = prompts(2, seed=step)
        with torch.no_grad():
            ids, attention, start, mask = sample(policy, tokenizer, texts)
            by_reference = logprobs_of(reference, ids, attention, start)
        completions = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        rewards = _rewards([text for text in texts for _ in range(GROUP)], completions)
        by_policy = logprobs_of(policy, ids, attention, start)
        loss = grpo_loss(by_policy, by_policy.detach(), by_reference, group_advantages(rewards), mask)
        rate = 1e-2 if step >= 40 and guard.attempt == 0 else 2e-4
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kl = per_token_kl(by_policy.detach(), by_reference)[mask]
        figures = {"reward": rewards.mean(), "loss": loss.detach(), "learning_rate": rate, "beta": 0.05}
        decision = guard.observe(step, kl.mean(), kl_max=kl.max(), **figures)
        if step % 4 == 0:
            path = folder / f"checkpoint-{step}.pt"
            newest = {"model": copy.deepcopy(policy.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
            torch.save(newest, path)
            guard.checkpoint_saved(step, path)
        if decision.action == "rollback":
            back = guard.go_back()
            assert back is not None
            guard.rolled_back(back.step)
            step = back.step
            policy.load_state_dict(newest["model"])  # the mistake: it should load `back.path`
            optimizer.load_state_dict(newest["optimizer"])
        elif decision.action == "halt":
            break
    guard.close()
    return attempts(folder)


RUNS: dict[str, Callable[[str, Path], Rows]] = {
    "healthy": healthy,
    "kl_blowup": kl_blowup,
    "kl_growth": kl_growth,
    "kl_nonfinite": kl_nonfinite,
    "kl_missing": kl_missing,
    "kl_frozen": kl_frozen,
    "kl_spikes": kl_spikes,
    "beta_runaway": beta_runaway,
    "kl_negative": kl_negative,
    "kl_saturated": kl_saturated,
    "kl_plateau": kl_plateau,
    "reference_mismatch": _wrong("random reference"),
    "reference_changed": _wrong("changing reference"),
    "reference_reset": reference_reset,
    "restored_kl_high": restored_kl_high,
    "token_outlier": _wrong("odd tokens"),
    "ref_policy_drift_asymmetry": _wrong("end of sequence"),
    "padding_in_mask": padding_in_mask,
    "entropy_collapse": _wrong("entropy collapse"),
    "rollback": rollback,
    "unguarded": unguarded,
}


def main() -> None:
    """Record what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; all where none is given")
    options = parser.parse_args()
    names = options.names or list(RUNS)
    if unknown := sorted(set(names) - set(RUNS)):
        parser.error(f"no run is called {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    logging.getLogger("kl_guard").setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        fitted = save_fitted(Path(folder) / "model")
        for name in names:
            rows = RUNS[name](fitted, Path(folder) / name)
            save(name, rows)
            shutil.rmtree(Path(folder) / name, ignore_errors=True)
            kl = [row["kl_mean"] for row in rows if row.get("kl_mean") is not None and math.isfinite(row["kl_mean"])]
            print(f"{name}: {len(rows)} rows, KL {f'{min(kl):.3g} to {max(kl):.3g}' if kl else 'none'}", flush=True)


if __name__ == "__main__":
    main()
