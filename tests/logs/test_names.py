"""Names of metrics: one row for each framework, with the file of that framework in which the names are."""

from __future__ import annotations

import pytest

from kl_guard.config import KLKind
from kl_guard.names import BY_NAME, FIELDS, KL_NAMES, RANKS
from kl_guard.reading import MetricReader

# framework, what one step of it logs, (KL taken, its kind), other metrics found there, other KLs
LOGS = [
    # TRL: trl/trainer/grpo_trainer.py, _compute_loss and log
    (
        "TRL GRPO",
        {"loss": 0.1, "kl": 0.02, "entropy": 1.0, "reward": 0.5, "reward_std": 0.1, "learning_rate": 1e-6},
        ("kl", "k3"),
        {"entropy": 1.0, "reward": 0.5, "reward_std": 0.1, "learning_rate": 1e-6, "loss": 0.1},
        (),
    ),
    # TRL: trl/experimental/async_grpo/async_grpo_trainer.py
    (
        "TRL AsyncGRPO",
        {"kl": 0.02, "entropy": 1.0, "sample/staleness_mean": 0.5, "learning_rate": 1e-6},
        ("kl", "sampler"),
        {"entropy": 1.0, "learning_rate": 1e-6},
        (),
    ),
    # TRL: trl/experimental/online_dpo/online_dpo_trainer.py; ppo_trainer.py (up to 1.10)
    (
        "TRL PPO",
        {
            "objective/kl": 4.0,
            "policy/approxkl_avg": 0.1,
            "policy/entropy_avg": 0.7,
            "objective/scores": 1.5,
            "lr": 1e-6,
        },
        ("objective/kl", "sequence_sum"),
        {"entropy": 0.7, "reward": 1.5, "learning_rate": 1e-6},
        ("policy/approxkl_avg",),
    ),
    # TRL: trl/trainer/kto_trainer.py: a batch estimate that is part of the loss, no distance to watch
    ("TRL KTO", {"kl": 3.0, "logps/chosen": -40.0, "rewards/chosen": 0.1, "loss": 0.4}, None, {}, ()),
    # verl: verl/workers/utils/losses.py, verl/trainer/ppo/ray_trainer.py
    (
        "verl",
        {
            "actor/kl_loss": 0.02,
            "actor/ppo_kl": 0.001,
            "actor/entropy": 0.7,
            "critic/score/mean": 0.4,
            "actor/lr": 1e-6,
        },
        ("actor/kl_loss", "k3"),
        {"entropy": 0.7, "reward": 0.4, "learning_rate": 1e-6},
        ("actor/ppo_kl",),
    ),
    # verl with the penalty in the reward: verl/trainer/ppo/ray_trainer.py, apply_kl_penalty
    (
        "verl, penalty in the reward",
        {"actor/reward_kl_penalty": 0.02, "actor/ppo_kl": 0.001, "actor/reward_kl_penalty_coeff": 0.1},
        ("actor/reward_kl_penalty", "k1"),
        {"beta": 0.1},
        ("actor/ppo_kl",),
    ),
    # verl: verl/trainer/ppo/rollout_corr_helper.py, where no reference is used
    (
        "verl without a reference",
        {"rollout_corr/kl": 0.01, "rollout_corr/k3_kl": 0.02, "actor/ppo_kl": 0.001},
        ("rollout_corr/k3_kl", "sampler"),
        {},
        ("actor/ppo_kl", "rollout_corr/kl"),
    ),
    # OpenRLHF: openrlhf/trainer/ray/ppo_actor.py, openrlhf/utils/logging_utils.py
    (
        "OpenRLHF",
        {"train/kl": 0.02, "train/ppo_kl": 0.01, "train/vllm_kl": 0.03, "train/actor_lr": 1e-6, "train/reward": 0.4},
        ("train/kl", "k1"),
        {"reward": 0.4, "learning_rate": 1e-6},
        ("train/ppo_kl", "train/vllm_kl"),
    ),
    # torchforge: apps/grpo/main.py at 0fd6345
    (
        "torchforge before 2026",
        {"grpo_loss/kl_divergence_mean": 0.02, "grpo_loss/kl_divergence_max": 4.0, "rl_trainer/learning_rate": 1e-6},
        ("grpo_loss/kl_divergence_mean", "k3"),
        {"kl_max": 4.0, "learning_rate": 1e-6},
        (),
    ),
    # torchforge: src/forge/rl/loss/primitives.py at 89f8536
    (
        "torchforge",
        {"loss/kl_ref/mean": 0.02, "loss/kl_policy/mean": 0.01, "loss/entropy/mean": 0.7},
        ("loss/kl_ref/mean", "k3"),
        {"entropy": 0.7},
        ("loss/kl_policy/mean",),
    ),
    # NeMo-RL: nemo_rl/algorithms/loss/loss_functions.py, nemo_rl/algorithms/grpo.py
    (
        "NeMo-RL",
        {"train/kl_penalty": 0.02, "train/gen_kl_error": 0.01, "train/approx_entropy": 0.7, "train/lr": 1e-6},
        ("train/kl_penalty", "k3"),
        {"entropy": 0.7, "learning_rate": 1e-6},
        ("train/gen_kl_error",),
    ),
    # SkyRL: skyrl_train/workers/worker.py (use_kl_loss)
    (
        "SkyRL",
        {
            "policy/policy_kl": 0.02,
            "policy/policy_entropy": 0.7,
            "policy/policy_lr": 1e-6,
            "reward/avg_raw_reward": 0.4,
        },
        ("policy/policy_kl", "k3"),
        {"entropy": 0.7, "learning_rate": 1e-6, "reward": 0.4},
        (),
    ),
    # SkyRL: skyrl_train/trainer.py (penalty in the reward)
    (
        "SkyRL, penalty in the reward",
        {"loss/avg_kl": 0.02, "loss/avg_kl_max": 3.0, "loss/kl_loss_coef": 0.1},
        ("loss/avg_kl", "k3"),
        {"kl_max": 3.0, "beta": 0.1},
        (),
    ),
    # slime: slime/backends/megatron_utils/loss.py and model.py
    (
        "slime",
        {
            "train/kl_loss": 0.02,
            "train/ppo_kl": 0.01,
            "train/entropy_loss": 0.7,
            "train/lr-pg_0": 1e-6,
            "train/pg_loss": 0.1,
        },
        ("train/kl_loss", "k1"),
        {"entropy": 0.7, "learning_rate": 1e-6},
        ("train/ppo_kl",),
    ),
    # prime-rl: src/prime_rl/trainer/rl/train.py and trainer/utils.py
    (
        "prime-rl",
        {"mismatch_kl/all/mean": 0.02, "mismatch_kl/all/max": 5.0, "entropy/all/mean": 0.7, "optim/lr": 1e-6},
        ("mismatch_kl/all/mean", "sampler"),
        {"kl_max": 5.0, "entropy": 0.7, "learning_rate": 1e-6},
        (),
    ),
    # ms-swift: swift/trainers/rlhf_trainer/grpo_trainer.py, names of TRL; its steps are "5/100"
    (
        "ms-swift",
        {"kl": 0.02, "reward": 0.4, "learning_rate": 1e-6, "global_step/max_steps": "5/100"},
        ("kl", "k3"),
        {"reward": 0.4, "learning_rate": 1e-6},
        (),
    ),
    # open-instruct: open_instruct/grpo_fast.py
    (
        "open-instruct",
        {"objective/kl0_avg": 0.01, "objective/kl1_avg": 0.02, "objective/kl2_avg": 0.03, "objective/kl3_avg": 0.04},
        ("objective/kl2_avg", "k3"),
        {},
        ("objective/kl0_avg", "objective/kl1_avg", "objective/kl3_avg"),
    ),
    # torchtune: recipes/dev/grpo_full_finetune_distributed.py
    (
        "torchtune GRPO",
        {"kl_loss": 0.02, "approx_policy_kl": 0.01, "rewards": 0.4, "lr": 1e-6},
        ("kl_loss", "k3"),
        {"reward": 0.4, "learning_rate": 1e-6},
        ("approx_policy_kl",),
    ),
    # torchtune: recipes/ppo_full_finetune_single_device.py
    ("torchtune PPO", {"kl": 3.0, "rlhf_reward": 0.4}, ("kl", "sequence_sum"), {"reward": 0.4}, ()),
    # Megatron-RL: train_rl.py
    ("Megatron-RL", {"rl/kl_term": 0.02, "rl/entropy_term": 0.7}, ("rl/kl_term", "k3"), {"entropy": 0.7}, ()),
    # Stable-Baselines3: stable_baselines3/ppo/ppo.py
    (
        "Stable-Baselines3",
        {"train/approx_kl": 0.01, "train/entropy_loss": 0.7, "rollout/ep_rew_mean": 0.4},
        ("train/approx_kl", "old_policy"),
        {"entropy": 0.7, "reward": 0.4},
        (),
    ),
]


@pytest.mark.parametrize(("framework", "row", "kl", "values", "others"), LOGS, ids=[log[0] for log in LOGS])
def test_what_a_framework_logs(framework, row, kl, values, others):
    """Policy to reference is taken where it is there, with its kind, the others are listed, and the rest is found."""
    reader = MetricReader()
    reader.look(row)
    source = reader.choose()
    if kl is None:
        assert source is None
        return
    assert (source.name, source.kind) == kl
    assert source.others == others
    found = reader.values(row)
    assert found.pop("kl_mean") == row[kl[0]]
    assert values.items() <= found.items()


@pytest.mark.parametrize(("framework", "row", "kl", "values", "others"), LOGS, ids=[log[0] for log in LOGS])
def test_the_prefix_of_a_tracker_changes_nothing(framework, row, kl, values, others):
    """`train/` as transformers' trackers put it, and the run's name as W&B's exports do."""
    for prefix in ("train/", "a-run, 3 - "):
        reader = MetricReader()
        named = {prefix + name.removeprefix("train/"): value for name, value in row.items()}
        reader.look(named)
        source = reader.choose()
        assert (source and source.kind) == (kl and kl[1]), prefix
        if source is not None:
            assert reader.values(named)["kl_mean"] == row[kl[0]]


def test_the_table_is_sound():
    """Kinds are those of the configuration, no name stands for two metrics, and each KL can be reached."""
    assert set(RANKS) == set(KLKind.__args__)
    assert all(entry.kind is None or entry.kind in RANKS for entry in KL_NAMES)
    assert not set(BY_NAME) & set(FIELDS)
    for name, entries in BY_NAME.items():
        assert all(entry.beside for entry in entries[:-1]), name  # an entry without conditions hides those behind it


def test_every_kl_name_is_in_a_row():
    """A name without a source is a guess."""
    older = {
        "kl_mean",
        "kl_guard/kl_mean",
        "rollout/kl",
        "objective/kl_avg",
        "mismatch_kl/mean",
        "mismatch/mismatch_kl",
        "mismatch/mismatch_k3_kl",
        "policy_kl_error",
        "ppo/policy/policykl",
    }  # the guard's own, older releases, and those that the table marks
    shown = {name.removeprefix("train/") for _, row, *_ in LOGS for name in row}
    assert set(BY_NAME) - shown == older
