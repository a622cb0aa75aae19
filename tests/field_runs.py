"""What the tests of reported cases have in common: feeding a guard, and hearing what a start says."""

from __future__ import annotations

import torch
from transformers import TrainerControl, TrainerState

from kl_guard import Finding, KLGuard, Severity
from kl_guard.tokens import summarize_tokens
from kl_guard_trl import KLGuardCallback
from trl import GRPOConfig

NAN = float("nan")


def feed(guard: KLGuard, rows, first=1):
    """Observe rows at consecutive steps up to a decision to act; return the last decision."""
    for step, row in enumerate(rows, start=first):
        decision = guard.observe(step, **row)
        if decision:
            break
    return decision


def findings(guard: KLGuard, signature: str) -> list[Finding]:
    """What was said of one signature."""
    return [finding for finding in guard.findings if finding.signature == signature]


def silent(said) -> bool:
    """Whether nothing was said above `info`."""
    return all(finding.severity <= Severity.INFO for finding in said)


def lines(caplog) -> list[str]:
    """What the guard logged."""
    return [record.getMessage() for record in caplog.records if record.name == "kl_guard"]


def start(tmp_path, caplog, max_steps=1000, **arguments) -> list[str]:
    """Begin a run of these GRPO arguments, by the callback alone; return what it says."""
    knobs = {name: arguments.pop(name) for name in ("action", "probe") if name in arguments}
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **arguments)
    guard, state = KLGuardCallback(**knobs), TrainerState()
    state.max_steps, state.num_train_epochs = max_steps, 1
    state.compute_steps(args, max_steps)
    guard.on_train_begin(args, state, TrainerControl())
    guard.guard.close()
    return lines(caplog)


def batch(seed, rows=8, width=60, scale=0.1):
    """Log-probs of policy and reference, a mask of ones, and ids from 10 on, [rows, width] each."""
    generator = torch.Generator().manual_seed(seed)
    policy = -torch.rand(rows, width, generator=generator)
    reference = policy + scale * torch.randn(rows, width, generator=generator)
    ids = torch.randint(10, 50, (rows, width), generator=generator)
    return policy, reference, torch.ones(rows, width, dtype=torch.bool), ids


def tokens(*tensors, **options):
    """The summary of a batch."""
    return summarize_tokens(*tensors, **options)
