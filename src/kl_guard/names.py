"""What trainers call their metrics: which names are a KL, and of which kind."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kl_guard.config import KLKind
from kl_guard.observation import ALIASES, METRICS


@dataclass(frozen=True, slots=True)
class KLName:
    """A name under which a trainer logs a KL, without a tracker's prefix.

    `kind` is None for a quantity that is called KL and must not be watched as one, `maximum` the name of its maximum
    over tokens. With `beside`, the name means this only where one of those is logged as well.
    """

    name: str
    kind: KLKind | None
    framework: str
    maximum: str | None = None
    beside: tuple[str, ...] = ()


# Earlier ones are preferred among those of one rank; of one name, the first whose `beside` fits counts.
KL_NAMES: tuple[KLName, ...] = (
    KLName("kl_mean", "k3", "kl-guard", "kl_max"),
    KLName("kl", None, "TRL KTO", beside=("logps/chosen", "logits/chosen")),  # a batch estimate for the loss
    KLName("kl", "sampler", "TRL AsyncGRPO", beside=("ratio", "sample/staleness_mean", "perf/fwd_bwd_s")),
    KLName("kl", "sequence_sum", "torchtune PPO", beside=("rlhf_reward",)),
    KLName("kl", "k1", "OpenRLHF", beside=("actor_lr", "act_lr", "vllm_kl", "logprobs_diff")),
    KLName("kl", "k3", "TRL GRPO, ms-swift"),  # RLOO has the same names and logs k1: told by values below 0
    KLName("actor/kl_loss", "k3", "verl"),  # kl_loss_type low_var_kl, the default
    KLName("actor/reward_kl_penalty", "k1", "verl"),
    KLName("loss/kl_ref/mean", "k3", "torchforge"),
    KLName("grpo_loss/kl_divergence_mean", "k3", "torchforge before 2026", "grpo_loss/kl_divergence_max"),
    KLName("policy/policy_kl", "k3", "SkyRL"),
    KLName("loss/avg_kl", "k3", "SkyRL", "loss/avg_kl_max"),  # its maximum is a mean of maxima per sequence
    KLName("kl_penalty", "k3", "NeMo-RL"),
    KLName("kl_loss", "k1", "slime", beside=("pg_loss", "lr-pg_0", "train_rollout_logprob_abs_diff")),  # its default
    KLName("kl_loss", "k3", "torchtune GRPO"),
    KLName("rollout/kl", "k1", "slime"),  # from its generic prefix, not a literal: uncertain
    KLName("objective/kl3_avg", None, "open-instruct", beside=("objective/kl0_avg",)),  # ratio times log-ratio there
    KLName("objective/kl2_avg", "k3", "open-instruct", beside=("objective/kl0_avg",)),
    KLName("objective/kl3_avg", "k3", "open-instruct before kl0"),
    KLName("objective/kl2_avg", "k2", "open-instruct before kl0"),
    KLName("objective/kl1_avg", "k2", "open-instruct"),
    KLName("objective/kl0_avg", "k1", "open-instruct"),
    KLName("objective/kl_avg", "k1", "open-instruct before kl0"),
    KLName("rl/kl_term", "k3", "Megatron-RL"),
    KLName("kl_guard/kl_mean", "k3", "kl-guard", "kl_guard/kl_max"),  # what the TRL callback adds to the trainer's log
    KLName("objective/kl", "sequence_sum", "TRL PPO, OnlineDPO, open-instruct PPO"),
    KLName("mismatch_kl/all/mean", "sampler", "prime-rl", "mismatch_kl/all/max"),
    KLName("mismatch_kl/mean", "sampler", "prime-rl before 2026-05"),
    KLName("loss/kl_policy/mean", "sampler", "torchforge"),
    KLName("rollout_corr/k3_kl", "sampler", "verl"),
    KLName("rollout_corr/kl", "sampler", "verl"),
    KLName("mismatch/mismatch_k3_kl", "sampler", "verl 2025-10"),
    KLName("mismatch/mismatch_kl", "sampler", "verl 2025-10"),
    KLName("vllm_kl", "sampler", "OpenRLHF"),
    KLName("gen_kl_error", "sampler", "NeMo-RL"),
    KLName("policy_kl_error", "sampler", "NeMo-RL"),
    KLName("actor/ppo_kl", "old_policy", "verl"),
    KLName("ppo_kl", "old_policy", "OpenRLHF, slime"),
    KLName("policy/approxkl_avg", "old_policy", "TRL PPO"),
    KLName("ppo/policy/policykl", "old_policy", "TRL PPO up to 0.11"),
    KLName("approx_policy_kl", "old_policy", "torchtune GRPO"),
    KLName("approx_kl", "old_policy", "Stable-Baselines3"),
)

RANKS: Mapping[KLKind, int] = {"k3": 0, "k1": 0, "k2": 0, "sequence_sum": 1, "sampler": 2, "old_policy": 2}
"""The smaller the better to watch: policy to reference, per token or per sequence, then what is no reference."""

BY_NAME: Mapping[str, list[KLName]] = {
    name: [entry for entry in KL_NAMES if entry.name == name] for name in dict.fromkeys(k.name for k in KL_NAMES)
}

BESIDE = frozenset(name for entry in KL_NAMES for name in entry.beside)
"""Names that tell what a KL beside them is."""

# Grad norms, losses and rewards that HOSTS has no row for are marked with (*): from the frameworks' documentation.
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "reward": (
        "critic/score/mean",  # verl, before its penalty
        "critic/rewards/mean",
        "objective/scores",  # TRL OnlineDPO, PPO
        "objective/rlhf_reward",
        "ppo/mean_scores",
        "reward/evaluate_response/avg_total_reward",  # torchforge
        "reward/avg_raw_reward",  # SkyRL
        "loss/avg_final_rewards",
        "rollout/raw_reward",  # slime
        "rollout/rewards",
        "rewards",  # torchtune
        "rlhf_reward",
        "scores",  # open-instruct (*)
        "rollout/ep_rew_mean",
    ),
    "entropy": (
        "actor/entropy",  # verl
        "actor/entropy_loss",
        "policy/policy_entropy",  # SkyRL
        "policy/entropy_avg",  # TRL PPO, open-instruct
        "objective/entropy",
        "loss/entropy/mean",  # torchforge
        "approx_entropy",  # NeMo-RL
        "entropy/all/mean",  # prime-rl
        "entropy_loss",  # OpenRLHF, slime
        "rl/entropy_term",
    ),
    "loss": (
        "actor/pg_loss",  # verl (*)
        "policy_loss",  # OpenRLHF (*)
        "policy/policy_loss",  # SkyRL (*)
        "loss/mean",  # prime-rl (*)
        "loss/total_avg",  # open-instruct
        "loss/policy_avg",
    ),
    "grad_norm": ("actor/grad_norm", "policy/raw_grad_norm", "policy/grad_norm", "optim/grad_norm"),  # (*)
    "learning_rate": (
        "actor/lr",  # verl
        "actor_lr",  # OpenRLHF
        "act_lr",
        "rl_trainer/learning_rate",  # torchforge
        "policy/policy_lr",  # SkyRL
        "optim/lr",  # prime-rl
        "lr-pg_0",  # slime
        "ppo/learning_rate",
    ),
    "beta": ("actor/kl_coef", "actor/reward_kl_penalty_coeff", "objective/kl_coef", "loss/kl_loss_coef"),
}


def _fields() -> dict[str, tuple[str, int]]:
    fields = {name: (name, 0) for name in METRICS if name != "kl_mean"}
    fields |= {alias: (name, 1) for alias, name in ALIASES.items() if name != "kl_mean"}
    for field, names in _OTHERS.items():
        fields |= {name: (field, place) for place, name in enumerate(names, start=2)}
    return fields


FIELDS: Mapping[str, tuple[str, int]] = _fields()
"""The metric of an observation that a name stands for, and its place in the order of preference."""

STEPS: tuple[str, ...] = (
    "step",
    "global_step",
    "train/global_step",  # transformers' trackers
    "training/global_step",  # verl
    "trainer/global_step",  # Lightning, SkyRL
    "train/step",  # slime
    "global_step/max_steps",  # ms-swift: "5/100"
    "training_step",  # open-instruct
    "iteration",
    "_step",  # W&B's own count of logs
    "Step",
)
"""Names of the step, the better first."""

_PREFIX = re.compile(r"^train(?:ing)?[/_.]")
_NOT_OF_A_STEP = frozenset({"train_loss", "train/train_loss"})  # the mean over a whole run, logged at its end


def split(key: str) -> tuple[str, str]:
    """Return the run that a key names ("" for none) and the metric, without what trackers put before it.

    >>> split("my-run - train/kl")
    ('my-run', 'kl')
    """
    run, _, name = key.rpartition(" - ")
    if name not in BY_NAME and name not in FIELDS and name not in _NOT_OF_A_STEP:
        name = _PREFIX.sub("", name)
    return run, name


def is_known(key: str) -> bool:
    """Return whether a key is a metric that the guard can use."""
    name = split(key)[1]
    return name in BY_NAME or name in FIELDS


def meaning(name: str, beside: Collection[str]) -> KLName | None:
    """Return what a KL of this name is in a log that has the names `beside`; None for an unknown name."""
    entries = BY_NAME.get(name, [])
    return next((entry for entry in entries if not entry.beside or not set(entry.beside).isdisjoint(beside)), None)
