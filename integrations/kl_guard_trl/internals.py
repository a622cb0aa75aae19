"""What the trainers keep to themselves and going back has to touch: here and nowhere else, checked when attached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROLLOUTS = ("_step", "_buffered_inputs")  # GRPO and RLOO, TRL 1.0 to 1.16


def why_not_back(trainer: Any) -> str:
    """Return why a run of this trainer cannot be taken back in the same process, "" where it can."""
    args = trainer.args
    names = {cls.__name__ for cls in type(trainer).__mro__}
    if "AsyncGRPOTrainer" in names:
        return (
            "AsyncGRPOTrainer stops its rollout worker for good when train() ends. The guard halts instead; start the "
            "script again with resume_from_checkpoint set to the checkpoint that it names"
        )
    if getattr(args, "save_only_model", False):
        return (
            "save_only_model=True saves weights without optimizer, scheduler and random state: training cannot go on "
            "from them. The guard halts instead, and names the weights to go back to; save_only_model=False "
            "makes rollback possible"
        )
    if getattr(args, "sync_ref_model", False) and (is_fsdp(trainer) or is_deepspeed(trainer)):
        return "sync_ref_model with a sharded model: the reference that moves cannot be kept. The guard halts instead"
    if is_deepspeed(trainer) and "scheduler" in _deepspeed_config(trainer):
        return (
            "the scheduler of DeepSpeed keeps its rates outside of checkpoints, so a changed one would not last. The "
            "guard halts instead; without a scheduler in DeepSpeed's configuration, that of the trainer is used"
        )
    missing = [name for name in ROLLOUTS if not hasattr(trainer, name)]
    if hasattr(args, "steps_per_generation") and missing:
        return (
            f"this version of {type(trainer).__name__} keeps its rollouts elsewhere (no {', '.join(missing)}), so "
            f"those of the diverged policy could not be dropped. The guard halts instead"
        )
    if not hasattr(trainer, "callback_handler"):
        return "this version of the trainer has no callback_handler. The guard halts instead"
    return ""


def is_fsdp(trainer: Any) -> bool:
    """Return whether the model is sharded by FSDP."""
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def is_deepspeed(trainer: Any) -> bool:
    """Return whether the model is trained by DeepSpeed."""
    return bool(getattr(trainer, "is_deepspeed_enabled", False))


def _deepspeed_config(trainer: Any) -> Mapping[str, Any]:
    config = getattr(getattr(trainer.args, "hf_deepspeed_config", None), "config", None)
    return config if isinstance(config, Mapping) else {}


def forget_rollouts(trainer: Any, step: int) -> None:
    """Drop what belongs to the policy that is left behind, so that the first step back generates anew.

    Rollouts that were generated for several steps, metrics of steps that do not count any more, the samples shown in
    logs, and the mark that the sampler (vLLM) already has the weights of this step.
    """
    if hasattr(trainer, "_step"):
        trainer._step = step * int(trainer.args.gradient_accumulation_steps)
    for name, value in (("_buffered_inputs", None), ("_last_loaded_step", -1), ("_entropy_window_stats", None)):
        if hasattr(trainer, name):
            setattr(trainer, name, value)
    metrics = getattr(trainer, "_metrics", None)
    if isinstance(metrics, dict):
        metrics.get("train", {}).clear()
    pending = getattr(trainer, "_pending_metrics", None)
    if pending is not None and hasattr(pending, "clear"):
        pending.clear()
    _clear(getattr(trainer, "_logs", None))


def _clear(logs: Any) -> None:
    """Empty the queues of a dict of queues, which may hold dicts of queues."""
    if isinstance(logs, dict):
        for value in logs.values():
            if isinstance(value, dict):
                _clear(value)
            elif hasattr(value, "clear"):
                value.clear()


def unwrap_engine(trainer: Any) -> None:
    """Let the next `train()` build a new DeepSpeed engine: the old one is destroyed at its beginning."""
    if is_deepspeed(trainer):
        trainer.model_wrapped = trainer.model


def beta_of(trainer: Any) -> float | None:
    """Return the weight of the KL penalty in use."""
    beta = getattr(trainer, "beta", None)
    return float(beta) if isinstance(beta, (int, float)) else None


def set_beta(trainer: Any, beta: float) -> None:
    """Set the weight of the KL penalty, also where a fused loss keeps its own."""
    trainer.beta = beta
    for name in ("liger_grpo_loss", "liger_loss"):
        fused = getattr(trainer, name, None)
        if fused is not None and hasattr(fused, "beta"):
            fused.beta = beta


def save_start(trainer: Any, folder: Path) -> Path:
    """Let the trainer save its state before the first step, in `folder`; return the checkpoint's folder.

    Every process must call this. Without sharding no process waits for another in it: one that fails fails alone.
    """
    with _saving_to(trainer, folder):
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
    return folder / f"checkpoint-{trainer.state.global_step}"


@contextmanager
def _saving_to(trainer: Any, folder: Path) -> Iterator[None]:
    """Send what the trainer saves to another folder, and nowhere else."""
    args = trainer.args
    before = {name: getattr(args, name) for name in ("output_dir", "push_to_hub", "save_total_limit")}
    args.output_dir, args.push_to_hub, args.save_total_limit = str(folder), False, None
    trainer.store_flos = lambda: None  # sums over all processes, and there is nothing to sum yet
    trainer.create_model_card = lambda *_, **__: None
    try:
        yield
    finally:
        del trainer.store_flos, trainer.create_model_card
        for name, value in before.items():
            setattr(args, name, value)


# What is watched of each step.

_PER_STEP = ("_metrics", "compute_loss", "_generate_and_score_completions")
WATCHED = ("kl", "entropy", "reward", "reward_std")
SAMPLER_GAP = "sampling/sampling_logp_difference/mean"


def why_no_steps(trainer: Any) -> str:
    """Return why the steps of this trainer cannot be watched one by one, "" where they can."""
    missing = [name for name in _PER_STEP if not hasattr(trainer, name)]
    if not missing and isinstance(getattr(trainer, "_metrics", None), dict):
        return ""
    return f"{type(trainer).__name__} keeps no metrics of single steps (no {', '.join(missing) or '_metrics'})"


def why_no_tokens(trainer: Any) -> str:
    """Return why the log-probs of tokens cannot be seen in this trainer, "" where they can."""
    if getattr(trainer, "use_liger_kernel", False) or getattr(trainer.args, "use_liger_kernel", False):
        return "the fused loss of Liger computes log-probs inside (use_liger_kernel=True)"
    if not hasattr(trainer, "_get_per_token_logps_and_entropies"):
        return f"this version of {type(trainer).__name__} computes log-probs elsewhere"
    return ""


def metric_lengths(trainer: Any) -> dict[str, int]:
    """Return how many values of the watched metrics the trainer holds for its next log."""
    training = trainer._metrics["train"]
    return {name: len(training[name]) for name in (*WATCHED, SAMPLER_GAP) if name in training}


def new_metrics(trainer: Any, before: Mapping[str, int]) -> dict[str, list[float]]:
    """Return what was added to the watched metrics since `before`."""
    training = trainer._metrics["train"]
    return {
        name: [float(value) for value in training[name][before.get(name, 0) :]]
        for name in (*WATCHED, SAMPLER_GAP)
        if len(training.get(name, ())) > before.get(name, 0)
    }


def add_metric(trainer: Any, name: str, value: float, *, largest: bool = False) -> None:
    """Let a value be logged by every tracker: the mean of the logging window, or its largest value."""
    values = trainer._metrics["train"][name]
    if largest and values:
        value = max(values[0], value)
        values.clear()
    values.append(value)


def drops_reference(trainer: Any, output: Any) -> bool:
    """Return whether this trainer computes the reference's log-probs and does not put them into the batch (RLOO)."""
    return (
        any(cls.__name__ == "RLOOTrainer" for cls in type(trainer).__mro__)
        and beta_of(trainer) != 0
        and isinstance(output, dict)
        and "ref_per_token_logps" not in output
        and "completion_ids" in output
    )


def tokenizer(trainer: Any) -> Any:
    """Return the tokenizer of the trainer's processing class; None where there is none."""
    processor = getattr(trainer, "processing_class", None)
    return getattr(processor, "tokenizer", processor)


def token_text(trainer: Any, token_id: int) -> str:
    """Return the text of a token; as the tokenizer keeps it where it is no text by itself, such as half a character."""
    known = tokenizer(trainer)
    kept, text = str(known.convert_ids_to_tokens(token_id)), str(known.decode([token_id]))
    if not text or "\ufffd" in text:
        return kept
    return f" {text}" if kept.startswith("\u2581") and not text.startswith(" ") else text  # SentencePiece strips it


def special_ids(trainer: Any) -> tuple[int | None, tuple[int, ...]]:
    """Return the ids of padding and of the ends of sequence."""
    known = tokenizer(trainer)
    pad, end = getattr(known, "pad_token_id", None), getattr(known, "eos_token_id", None)
    ends = {end, *_as_ids(getattr(getattr(trainer.model, "generation_config", None), "eos_token_id", None))}
    return pad, tuple(sorted(one for one in ends if one is not None))


def content_free_ids(trainer: Any) -> tuple[int, ...]:
    """Return the ids that the tokenizer calls special: end of text, padding, the marks of the chat template."""
    return tuple(int(one) for one in getattr(tokenizer(trainer), "all_special_ids", None) or ())


def _as_ids(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [int(value)]


def is_sharded(trainer: Any) -> bool:
    """Return whether a process holds only a part of each parameter."""
    stage = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", 0)
    return is_fsdp(trainer) or (is_deepspeed(trainer) and stage == 3)


def temperature(trainer: Any) -> float:
    """Return the sampling temperature, by which the trainer divides logits before it takes log-probs."""
    value = getattr(trainer, "temperature", None)
    return float(value) if isinstance(value, (int, float)) and value > 0 else 1.0
