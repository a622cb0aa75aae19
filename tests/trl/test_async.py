"""Async GRPO: a real trainer on a CPU, with samples handed in, since generation needs a server."""

import itertools
import queue
import time

import numpy as np
import pytest

from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, build_dataset, build_tokenizer, reward
from trl_runs import SetKL

pytestmark = pytest.mark.newest


class Worker:
    """Always has samples: random answers with random advantages."""

    def __init__(self, sample_class):
        self.sample_class = sample_class
        self.version = 0
        self.stopped = False
        self.numbers = itertools.count()
        self.rng = np.random.default_rng(0)
        self.rollout_buffer = self
        self.metrics_queue = queue.Queue()

    def get(self, timeout=None):
        if self.stopped:
            raise queue.Empty
        ids = self.rng.integers(3, 32, 9)
        return self.sample_class(
            prompt=[{"role": "user", "content": "w1 w2 w3"}],
            completion=[{"role": "assistant", "content": "w1"}],
            input_ids=ids,
            completion_mask=np.array([0, 0, 0, 1, 1, 1, 1, 1, 1]),
            old_log_probs=np.full(9, -3.0, dtype=np.float32),
            advantage=float(self.rng.normal()),
            model_version=self.version,
            metrics={"reward": 0.5, "reward_std": 0.1},
            group_id=next(self.numbers) // 8,
            enqueued_at=time.time(),
        )

    def qsize(self):
        return 8

    def start(self):
        pass

    def stop(self):
        self.stopped = True

    def update_model_version(self, model_version):
        self.version = model_version

    def check_health(self, stale_after_s):
        pass


class NoTransfer:
    """Sends weights nowhere."""

    def __getattr__(self, name):
        return lambda *args: [None for _ in args[0]] if name == "send_weights" else None


def test_rollback_is_refused_and_the_halt_works(fitted, tmp_path, caplog, monkeypatch):
    """The reason and what works instead are said at the start; the halt names a checkpoint and keeps the state."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "none")  # asked for a device's peak FLOPs
    keep = {"learning_rate", "lr_scheduler_type", "logging_steps", "report_to", "use_cpu", "disable_tqdm", "bf16"}
    settings = {name: value for name, value in GRPO.items() if name in keep}
    guard = KLGuardCallback(action="rollback")
    trainer = AsyncGRPOTrainer(
        model=fitted,
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path / "run"),
            max_steps=60,
            per_device_train_batch_size=8,
            token_budget=0,
            save_strategy="steps",
            save_steps=2,
            gradient_checkpointing=False,
            **settings,
        ),
        reward_funcs=reward,
        train_dataset=build_dataset(),
        processing_class=build_tokenizer(),
        callbacks=[SetKL(lambda step: 0.01 if step < 20 else 0.01 * 1.8 ** (step - 20)), guard],
        rollout_worker=Worker(RolloutSample),
        weight_transfer=NoTransfer(),
    )
    trainer.model.set_attn_implementation("eager")  # its own needs a kernel for accelerators
    guard.attach(trainer)
    trainer.train()
    assert "action='rollback' is not possible here: AsyncGRPOTrainer stops its rollout worker" in caplog.text
    assert guard.guard.config.kl_kind == "sampler"
    assert guard.halted
    assert guard.decision.action == "halt"
    assert not guard.rollbacks
    assert trainer.state.global_step == guard.decision.reason.step < 60
    assert guard.decision.checkpoint.step < 20
    assert (tmp_path / "run" / "kl_guard" / "halted" / f"step-{trainer.state.global_step}").is_dir()
