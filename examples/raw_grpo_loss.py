"""A GRPO loss in plain torch that no single token can blow up, and a loop around it that the guard watches.

The loss of many home-made loops multiplies by the mask after exp, and takes exp of whatever log-ratio comes: one token
that the reference likes e^22 times more than the policy does sets the whole batch (torchforge issue 664), and inf under
the mask becomes NaN. Here log-ratios are clipped before exp, what the mask hides is left out before anything is
computed, and the KL that is logged is not clipped: the guard sees what is there.

    python examples/raw_grpo_loss.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from kl_guard import GuardConfig, KLGuard
from kl_guard.tokens import per_token_kl, summarize_tokens
from tiny_task import build_model, build_tokenizer, fit, prompts, reward

GROUP = 8  # completions of one prompt
LENGTH = 8  # tokens of a completion


def grpo_loss(
    policy: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.05,
    epsilon: float = 0.2,
    log_ratio_clip: float = 20.0,
    ids: Tensor | None = None,
) -> Tensor:
    """Return the loss: the clipped objective of PPO with group-relative advantages, plus a KL penalty, per token.

    Parameters
    ----------
    policy, old, reference:
        Log-probs of the sampled tokens by the policy (with gradients), by the policy that sampled them, and by the
        reference; [batch, tokens].
    advantages:
        One for each completion; [batch].
    mask:
        Tokens that were sampled; [batch, tokens], bool.
    beta:
        Weight of the KL penalty.
    epsilon:
        The ratio of policy to old policy is clipped to 1 +- this.
    log_ratio_clip:
        Every log-ratio is clipped to +- this many nats before exp.
    ids:
        Ids of the tokens; the loss does not need them, a guard that watches it does.
    """
    log_ratio = torch.where(mask, policy - old, 0.0).clamp(-log_ratio_clip, log_ratio_clip)
    ratio = log_ratio.exp()
    gain = advantages.unsqueeze(1)
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - epsilon, 1 + epsilon) * gain)
    kl = per_token_kl(policy, reference, "k3", log_ratio_clip=log_ratio_clip, mask=mask)
    per_token = torch.where(mask, beta * kl - objective, 0.0)
    return per_token.sum() / mask.sum().clamp(min=1)


def group_advantages(rewards: Tensor) -> Tensor:
    """Return how much better each completion is than its group, in standard deviations; [batch]."""
    groups = rewards.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def logprobs_of(model: Qwen2ForCausalLM, ids: Tensor, attention: Tensor, start: int) -> Tensor:
    """Return the log-probs of the tokens from position `start` on, in float32; [batch, tokens]."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, start - 1 : -1].float()
    return logits.gather(-1, ids[:, start:].unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def naive_loss(policy: Tensor, reference: Tensor, mask: Tensor, beta: float = 0.05) -> Tensor:
    """Return the KL term as it is often written: exp of what comes, then the mask."""
    x = reference - policy
    return (beta * (x.exp() - x - 1) * mask).sum() / mask.sum()


def one_token_too_far() -> None:
    """Show what a single token, and padding that holds -inf, do to the gradient of either loss."""
    reference = torch.full((4, 100), -1.0)
    mask = torch.ones(4, 100, dtype=torch.bool)
    mask[:, 90:] = False
    for what in ("sound", "one token of 22.64 nats", "the same, and padding of -inf"):
        policy = torch.full((4, 100), -1.01)
        if what != "sound":
            policy[2, 40] = -23.64
        if "padding" in what:
            policy[:, 90:] = -torch.inf
        norms = []
        for safe in (False, True):
            scores = policy.clone().requires_grad_()
            loss = (
                grpo_loss(scores, scores.detach(), reference, torch.ones(4), mask)
                if safe
                else naive_loss(scores, reference, mask)
            )
            loss.backward()
            norms.append(scores.grad.norm().item())
        print(f"{what:32s} grad norm: naive {norms[0]:10.4g}, safe {norms[1]:10.4g}")


def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Return ids and attention mask of prompts with completions, where these begin, and their mask."""
    batch = tokenizer([text for text in texts for _ in range(GROUP)], return_tensors="pt", padding=True)
    start = batch["input_ids"].shape[1]
    ids = model.generate(**batch, do_sample=True, max_new_tokens=LENGTH, top_k=0, pad_token_id=tokenizer.pad_token_id)
    completion = ids[:, start:]
    ended = (completion == tokenizer.eos_token_id).cumsum(1)
    mask = (ended == 0) | (
        (ended == 1) & (completion == tokenizer.eos_token_id)
    )  # by position, not by the id of padding
    return ids, torch.cat([batch["attention_mask"], mask.long()], dim=1), start, mask


def train(steps: int, learning_rate: float, output_dir: str | None) -> KLGuard:
    """Train the toy policy in a plain loop, watched; return the guard."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model, reference = build_model(tokenizer), build_model(tokenizer)
    fit(model, tokenizer)
    reference.load_state_dict(model.state_dict())
    reference.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    guard = KLGuard(GuardConfig(), output_dir=output_dir, token_text=tokenizer.convert_ids_to_tokens)
    for step in range(1, steps + 1):
        texts = prompts(2, seed=step)
        with torch.no_grad():
            ids, attention, start, mask = sample(model, tokenizer, texts)
            reference_logprobs = logprobs_of(reference, ids, attention, start)
        completions = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        rewards = torch.tensor(reward([text for text in texts for _ in range(GROUP)], completions))
        policy_logprobs = logprobs_of(model, ids, attention, start)
        advantages = group_advantages(rewards)
        loss = grpo_loss(policy_logprobs, policy_logprobs.detach(), reference_logprobs, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens = summarize_tokens(policy_logprobs, reference_logprobs, mask, ids[:, start:])
        decision = guard.observe(
            step=step,
            tokens=tokens,
            loss=loss.item(),
            grad_norm=norm,
            reward=rewards.mean(),
            learning_rate=learning_rate,
            beta=0.05,
        )
        if step % 10 == 0 or decision:
            print(f"step {step:3d}  reward {rewards.mean():.2f}  KL {guard.history[-1].kl_mean:.4f}  {decision.action}")
        if decision.action != "continue":
            break
    guard.close()
    return guard


def main() -> None:
    """Compare the losses on one broken batch, then train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--output-dir", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    one_token_too_far()
    train(options.steps, options.learning_rate, options.output_dir)


if __name__ == "__main__":
    main()
