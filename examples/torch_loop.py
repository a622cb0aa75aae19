"""A plain torch loop that blows up, is taken back, and ends healthy.

A slow start goes well; then the learning rate warms up to a height that this task does not bear. `TorchGuard` sees the
tokens through the loss function, saves complete checkpoints, and restores everything in place: weights, optimizer,
scheduler, random state. Takes under a minute.

    python examples/torch_loop.py --output-dir torch-output
    python examples/torch_loop.py --unguarded     # where the same settings lead without it
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from statistics import mean

import torch
from torch.optim.lr_scheduler import LambdaLR

from kl_guard import KLGuardHalted
from kl_guard_torch import TorchGuard
from raw_grpo_loss import GROUP, group_advantages, grpo_loss, logprobs_of, sample
from tiny_task import build_model, build_tokenizer, fit, prompts, reward

STEPS = 120
RATE = 1e-2
BETA = 0.3
SLOW_STEPS, WARMUP_STEPS, START = 40, 10, 0.02
SAVE_EVERY = 10


def schedule(step: int) -> float:
    """Return the share of the learning rate: slow at first, then up to all of it."""
    return START + (1 - START) * min(1.0, max(0.0, (step - SLOW_STEPS) / WARMUP_STEPS))


def train(seed: int, output_dir: str, action: str) -> tuple[TorchGuard, list[float]]:
    """Train the toy policy; return the guard, and KL by step as it stands at the end."""
    tokenizer = build_tokenizer()
    policy, reference = build_model(tokenizer, seed), build_model(tokenizer, seed)
    fit(policy, tokenizer, seed=seed)
    reference.load_state_dict(policy.state_dict())
    reference.eval().requires_grad_(False)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
    scheduler = LambdaLR(optimizer, schedule)

    guard = TorchGuard(
        action=action,
        lr_factor=0.2,
        beta_factor=3.0,
        model=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        output_dir=output_dir,
        keep=3,
        expected_steps=STEPS,
        token_text=tokenizer.convert_ids_to_tokens,
    )
    loss_of = guard.watch_loss(grpo_loss, policy_logprobs="policy", ref_logprobs="reference", token_ids="ids")
    step = guard.resume()
    while step < STEPS:
        step += 1
        texts = prompts(2, seed=step)  # the data of a step depend on its number: they need no state of their own
        with torch.no_grad():
            ids, attention, start, mask = sample(policy, tokenizer, texts)
            reference_logprobs = logprobs_of(reference, ids, attention, start)
        completions = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        rewards = torch.tensor(reward([text for text in texts for _ in range(GROUP)], completions))
        logprobs = logprobs_of(policy, ids, attention, start)
        beta = BETA * guard.beta_factor
        loss = loss_of(
            policy=logprobs,
            old=logprobs.detach(),
            reference=reference_logprobs,
            advantages=group_advantages(rewards),
            mask=mask,
            beta=beta,
            ids=ids[:, start:],
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        decision = guard.step(step, loss=loss.detach(), grad_norm=norm, reward=rewards.mean(), beta=beta)
        if decision.action == "rollback":
            step = guard.rollback()
        elif decision.action == "halt":
            break
        elif step % SAVE_EVERY == 0:
            guard.save(step)
    guard.close()
    return guard, [observation.kl_mean or 0.0 for observation in guard.guard.history]


def main() -> None:
    """Train, and say what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", default=None, help="a folder that is empty, or holds a run to go on with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unguarded", action="store_true", help="only say what is seen")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        action = "warn" if options.unguarded else "rollback"
        try:
            guard, kl = train(options.seed, options.output_dir or folder, action)
        except KLGuardHalted as error:
            raise SystemExit(f"stopped: {error}") from error
    print(f"steps {len(kl)}, rollbacks {guard.attempt}, KL of the last 10 steps {mean(kl[-10:]):.2f}")
    print(f"learning rate x{0.2**guard.attempt:g}, beta x{guard.beta_factor:g}")


if __name__ == "__main__":
    main()
