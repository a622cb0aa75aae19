"""Real GRPO runs of the toy task, each made wrong in one way, and what the guard must call it.

`run("dropout", fitted, folder, seed)` trains and returns the callback; `recognised("dropout", callback)` says whether
the guard saw what was wrong. It did where the first finding of severity warn or critical of the run names, as its first
cause, the one in `CAUSES`. Two kinds are told by their signature, wherever in the run it comes: odd tokens in a single
step must give TOKEN_OUTLIER with that first cause and nothing critical, a policy without entropy ENTROPY_COLLAPSE.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from kl_guard import Finding, Severity
from kl_guard_trl import KLGuardCallback
from tiny_task import GRPO, LearningRateJump, build_dataset, build_model, build_tokenizer, reward
from trl import GRPOConfig, GRPOTrainer

CAUSES = {
    "dropout": "dropout is on while log-probs are computed",
    "random reference": "the reference is not the model that the policy started from",
    "changing reference": "the reference is changing",
    "end of sequence": "the end of sequence is scored differently by policy and reference",
    "no penalty": "there is hardly any KL penalty",
    "raised learning rate": "the learning rate was raised",
    "padding": "the mask lets padding through",
    "odd tokens": "a few tokens carry the KL, not the policy at large",
    "adapter": "the reference is the base model without the adapter that the policy started from",
    "entropy collapse": "the policy has become deterministic",
}
KINDS = tuple(CAUSES)
SIGNATURES = {"odd tokens": "TOKEN_OUTLIER", "entropy collapse": "ENTROPY_COLLAPSE"}


def run(kind: str, fitted: str, output_dir: Path, seed: int, max_steps: int | None = None) -> KLGuardCallback:
    """Train a run of this kind, or a sound one ("healthy", "held"); return its callback."""
    return _BUILDERS[kind](fitted, output_dir, seed, max_steps)


def recognised(kind: str, callback: KLGuardCallback) -> bool:
    """Whether the guard saw what was wrong; see the module."""
    findings = callback.guard.findings if kind in SIGNATURES else warnings(callback)[:1]
    named = any(
        finding.signature == SIGNATURES.get(kind, finding.signature)
        and [cause.name for cause in finding.causes[:1]] == [CAUSES[kind]]
        for finding in findings
    )
    return named and (kind != "odd tokens" or spared(callback))


def spared(callback: KLGuardCallback) -> bool:
    """Whether the run was left alone: no halt, nothing critical."""
    return not callback.halted and all(f.severity < Severity.CRITICAL for f in callback.guard.findings)


def warnings(callback: KLGuardCallback) -> list[Finding]:
    """What was said above severity info, in order."""
    return [finding for finding in callback.guard.findings if finding.severity >= Severity.WARN]


def story(callback: KLGuardCallback) -> str:
    """What was said, with the first cause of each: for a test that fails."""
    return "; ".join(
        f"{f.signature} ({f.severity}) at {f.step}: {f.causes[0].name if f.causes else 'no cause'}"
        for f in callback.guard.findings
    )


# What the kinds have in common: a trainer, a guard attached to it, and a run.


def _trainer(
    fitted, output_dir, seed, *, model=None, rewards=reward, callbacks=(), trainer_class=GRPOTrainer, **arguments
):
    trainer = trainer_class(
        model=fitted if model is None else model,
        args=GRPOConfig(output_dir=str(output_dir), seed=seed, **{**GRPO, **arguments}),
        reward_funcs=rewards,
        train_dataset=build_dataset(seed=seed),
        processing_class=build_tokenizer(),
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _train(trainer, **options):
    guard = KLGuardCallback(**options).attach(trainer)
    trainer.train()
    return guard


def _healthy(fitted, output_dir, seed, max_steps):
    return _train(_trainer(fitted, output_dir, seed, max_steps=max_steps or 40))


# One function for each kind.


def _dropout(fitted, output_dir, seed, max_steps):
    """The trainer scores the policy in training mode, and with it what drops out.

    Much does: with a rate of 0.1 the first KL of this small model is below what REFERENCE_MISMATCH warns of.
    """
    return _train(
        _trainer(fitted, output_dir, seed, max_steps=max_steps or 30, model_init_kwargs={"attention_dropout": 0.3})
    )


def _random_reference(fitted, output_dir, seed, max_steps):
    """The reference was never loaded: its weights are as they were drawn."""
    trainer = _trainer(fitted, output_dir, seed, max_steps=max_steps or 30)
    trainer.ref_model.load_state_dict(build_model(build_tokenizer(), seed=seed + 1).state_dict())
    return _train(trainer)


class _Nudge(TrainerCallback):
    """Moves the reference a little after each step, as something that writes to it would."""

    def __init__(self, reference, size):
        self.reference = reference
        self.size = size

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs):
        for parameter in self.reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=self.size)


def _changing_reference(fitted, output_dir, seed, max_steps):
    trainer = _trainer(fitted, output_dir, seed, max_steps=max_steps or 40)
    trainer.add_callback(_Nudge(trainer.ref_model, size=1e-3))
    return _train(trainer)


def _end_of_sequence(fitted, output_dir, seed, max_steps):
    """The reference has never learnt this end of sequence, as where its token was added for the policy."""
    trainer = _trainer(fitted, output_dir, seed, max_steps=max_steps or 30)
    trainer.ref_model.get_output_embeddings().weight.data[trainer.processing_class.eos_token_id] = 0.0
    return _train(trainer)


def _one_word(prompts, completions, **kwargs):
    """A reward that a single word earns, and that a penalty has to hold: the share of it in what may be written."""
    return [completion.split().count("w0") / GRPO["max_completion_length"] for completion in completions]


def _no_penalty(fitted, output_dir, seed, max_steps, beta=1e-6):
    arguments = {"beta": beta, "learning_rate": 5e-4, "max_steps": max_steps or 60}
    return _train(_trainer(fitted, output_dir, seed, rewards=_one_word, **arguments))


def _held(fitted, output_dir, seed, max_steps):
    """The same with a proper penalty: it is not halted."""
    return _no_penalty(fitted, output_dir, seed, max_steps, beta=0.5)


def _raised_learning_rate(fitted, output_dir, seed, max_steps):
    jump = LearningRateJump(step=25, factor=30.0)
    return _train(_trainer(fitted, output_dir, seed, max_steps=max_steps or 60, callbacks=[jump]))


class _CountsPadding(GRPOTrainer):
    """Its mask of completions is 1 behind their end too."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["completion_mask"] = torch.ones_like(output["completion_mask"])
        return output


def _padding(fitted, output_dir, seed, max_steps):
    return _train(_trainer(fitted, output_dir, seed, trainer_class=_CountsPadding, max_steps=max_steps or 30))


_REFERENCE = "ref_per_token_logps"


class _Hit(TrainerCallback):
    """Puts other output weights into the place of one word's for one step, after its completions were sampled.

    The word is the most seldom one of the batch: then one or two tokens show it, as in a batch of thousands.
    """

    def __init__(self, trainer, step):
        self.trainer = trainer
        self.step = step
        self.padding = trainer.processing_class.pad_token_id
        self.word = self.before = None

    @property
    def _weights(self):
        return self.trainer.model.get_output_embeddings().weight.data

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 != self.step:
            return
        batch = self.trainer._buffered_inputs[1]  # sampled together with those of the step before
        written, scores = (batch[name][batch["completion_mask"].bool()] for name in ("completion_ids", _REFERENCE))
        words = Counter(written.tolist())
        seldom = min(words.values())
        _, self.word = max(
            (score, word)
            for score, word in zip(scores.tolist(), written.tolist(), strict=True)
            if words[word] == seldom and word != self.padding
        )
        self.before = self._weights[self.word].clone()
        self._weights[self.word] = 2 * self._weights[self.padding]

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self._weights[self.word] = self.before


def _odd_tokens(fitted, output_dir, seed, max_steps):
    many_prompts = {"num_generations": 2, "steps_per_generation": 2}
    trainer = _trainer(fitted, output_dir, seed, max_steps=max_steps or 30, **many_prompts)
    trainer.add_callback(_Hit(trainer, step=16))
    return _train(trainer)


def _adapter(fitted, output_dir, seed, max_steps):
    """The policy starts with a trained adapter; TRL's copy of it for the reference is gone, so it disables it."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(fitted)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    trainer = _trainer(fitted, output_dir, seed, model=model, max_steps=max_steps or 30)
    trainer.model.delete_adapter("ref")
    return _train(trainer)


def _entropy_collapse(fitted, output_dir, seed, max_steps):
    """The guard only speaks: KL blows up on the way."""
    arguments = {"beta": 1e-3, "learning_rate": 3e-3, "max_steps": max_steps or 40}
    return _train(_trainer(fitted, output_dir, seed, rewards=_one_word, **arguments), action="warn")


_BUILDERS = {
    "healthy": _healthy,
    "dropout": _dropout,
    "random reference": _random_reference,
    "changing reference": _changing_reference,
    "end of sequence": _end_of_sequence,
    "no penalty": _no_penalty,
    "held": _held,
    "raised learning rate": _raised_learning_rate,
    "padding": _padding,
    "odd tokens": _odd_tokens,
    "adapter": _adapter,
    "entropy collapse": _entropy_collapse,
}
