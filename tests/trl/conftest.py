"""Real trainers on a toy task: one fine-tuned model per session, runs of a few dozen steps."""

from __future__ import annotations

import pytest
import torch
import transformers
from filelock import FileLock
from peft import LoraConfig
from transformers import PrinterCallback

from tiny_task import GRPO, build_dataset, build_tokenizer, reward, save_fitted
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_runs import patch

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def pytest_collection_modifyitems(items):
    """Mark what trains; what the frameworks warn of differs by their version and is theirs."""
    for item in items:
        if "trl" in item.path.parts:
            item.add_marker(pytest.mark.trl)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def _calm():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def fitted(tmp_path_factory, worker_id):
    """The fine-tuned toy model, made once, also where several workers run the tests."""
    if worker_id == "master":
        return save_fitted(tmp_path_factory.mktemp("fitted"))
    folder = tmp_path_factory.getbasetemp().parent / "fitted"
    with FileLock(f"{folder}.lock"):
        done = folder / "done"
        if not done.exists():
            done.write_text(str(save_fitted(folder)))
        return done.read_text()


@pytest.fixture
def make_trainer(fitted, tmp_path):
    """Build a real trainer: `make_trainer(callbacks, kind="grpo", max_steps=..., **arguments)`."""

    def make(callbacks=(), kind="grpo", output_dir=None, eval_dataset=None, lora=False, **arguments):
        trainer_class, config_class = TRAINERS[kind]
        settings = {**GRPO, "learning_rate": 1e-4, "max_steps": 12, **arguments}
        trainer = trainer_class(
            model=fitted,
            args=config_class(output_dir=str(output_dir or tmp_path / "run"), **settings),
            reward_funcs=reward,
            train_dataset=build_dataset(),
            eval_dataset=eval_dataset,
            processing_class=build_tokenizer(),
            callbacks=list(callbacks),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None,
        )
        trainer.remove_callback(PrinterCallback)
        patch(trainer, callbacks)
        return trainer

    return make
