"""KL to a reference where the trainer keeps none (beta 0): measured on the current batch, every few steps."""

from __future__ import annotations

import copy
import inspect
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from kl_guard.paths import unused
from kl_guard_trl import internals

logger = logging.getLogger("kl_guard")

ROWS = 4  # completions scored at once: their logits in float32 are what takes memory
HEADROOM = 1.25  # what must be free, times what the reference takes
NAME = "initial.safetensors"


class ReferenceProbe:
    """Scores batches with a reference that the trainer does not have.

    That is the model given, else the policy with its adapter off, else a copy of the initial weights, kept on the CPU
    (and on disk, for a resumed run) and brought to the device only to score. The policy's weights are never touched;
    scoring is done in eval mode, without gradients, at the trainer's sampling temperature, and leaves every random
    state as it was.

    Parameters
    ----------
    trainer:
        A `GRPOTrainer` or `RLOOTrainer`.
    reference:
        The user's reference; None for the adapter or the initial weights.
    every:
        Steps from one probe to the next.

    Attributes
    ----------
    why_not:
        Why there is no probe; "" where there is one.
    """

    def __init__(self, trainer: Any, reference: nn.Module | None, every: int) -> None:
        self.trainer = trainer
        self.every = every
        self.why_not = ""
        self._given = reference
        self._initial: nn.Module | None = None
        self._told_cost = False
        if internals.beta_of(trainer) != 0:
            self.why_not = "the trainer has a reference of its own"
        elif internals.is_sharded(trainer):
            self.why_not = "a sharded model cannot be scored outside of the trainer's own forward pass"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind}, every={self.every}, why_not={self.why_not!r})"

    @property
    def kind(self) -> str:
        """What is scored with."""
        if self._given is not None:
            return "the given reference"
        return "the model with its adapter off" if self._has_adapter else "the initial weights"

    def due(self) -> bool:
        """Whether the step under way is one to measure."""
        return not self.why_not and self.trainer.state.global_step % self.every == 0

    def prepare(self, folder: Path, *, fresh: bool, writes: bool) -> None:
        """Keep the initial weights where they are needed, or find those of the run that is resumed.

        Parameters
        ----------
        folder:
            Where they are kept on disk.
        fresh:
            Whether the policy holds the weights that the run starts from.
        writes:
            Whether this process writes the file.
        """
        if self.why_not:
            return
        if self._given is self._policy:
            self.why_not = "the reference given is the policy itself: give a copy of what it starts from"
        elif self._given is None and self._has_adapter and _trains_biases(self._policy):
            self.why_not = "this adapter trains biases of the base model, so with the adapter off it is no reference"
        if self.why_not or self._given is not None or self._has_adapter or (self._initial is not None and not fresh):
            return
        path = folder / NAME
        if not fresh and not path.is_file():
            self.why_not = f"the initial weights of the resumed run are not in {path}; give a reference instead"
            return
        model = self._policy
        need = HEADROOM * _bytes(model)
        free = _free_memory()
        if free is not None and free < need:
            self.why_not = f"a copy of the initial weights needs {_gb(need)} of memory, and {_gb(free)} are free"
            return
        initial = _copy_to_cpu(model).eval().requires_grad_(False)
        if not fresh:
            try:
                load_model(initial, str(path))
            except Exception as error:
                self.why_not = f"the initial weights in {path} cannot be read ({error}); give a reference instead"
                return
        self._initial = initial
        if fresh and writes:
            folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < 2 * need:
                logger.warning(
                    "kl-guard: %s has no room for the initial weights: a resumed run cannot probe them", folder
                )
                return
            draft = path.with_suffix(".tmp")
            save_model(self._initial, str(draft))
            draft.rename(path)

    @torch.no_grad()
    def score(self, inputs: Any) -> Tensor | None:
        """Return the reference's log-probs of a batch's completions, [rows, tokens]; None where memory would not do."""
        if any(inputs.get(name) is not None for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")):
            self.why_not = "batches with images are not scored by the probe"
            return None
        began = time.perf_counter()
        device = inputs["completion_ids"].device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), self._reference(device) as model:
            if model is None:
                return None
            logprobs = self._logprobs(model, inputs)
        self._tell_cost(time.perf_counter() - began, len(logprobs))
        return logprobs

    def _logprobs(self, model: nn.Module, inputs: Any) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].shape[1]
        extra = {"logits_to_keep": length + 1} if _takes(model, "logits_to_keep") else {}
        temperature = internals.temperature(self.trainer)
        scored = []
        with self.trainer.accelerator.autocast():
            for first in range(0, len(ids), ROWS):
                last = first + ROWS
                out = model(input_ids=ids[first:last], attention_mask=mask[first:last], use_cache=False, **extra)
                logits = out.logits[:, -length - 1 : -1].float() / temperature
                chosen = inputs["completion_ids"][first:last].unsqueeze(-1)
                scored.append(logits.gather(-1, chosen).squeeze(-1) - logits.logsumexp(-1))
        return torch.cat(scored)

    @contextmanager
    def _reference(self, device: torch.device) -> Iterator[nn.Module | None]:
        """Give the reference in eval mode on the device; afterwards everything is where and as it was."""
        if self._given is None and self._has_adapter:
            policy = self._policy
            # PEFT makes all of an adapter trainable when it is switched on again, also what the user had frozen.
            with _trainable_as_it_is(policy), _eval_mode(policy), policy.disable_adapter():  # type: ignore[operator]
                yield policy
            return
        model = self._given if self._given is not None else self._initial
        if model is None:
            self.why_not = "the initial weights were not kept"
            yield None
            return
        home = next(model.parameters()).device
        if home != device and not self._fits(model, device):
            yield None
            return
        with _eval_mode(model):
            try:
                yield model.to(device)
            finally:
                model.to(home)

    def _fits(self, model: nn.Module, device: torch.device) -> bool:
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        need = HEADROOM * _bytes(model)
        if free < need:
            self.why_not = f"the reference needs {_gb(need)} on {device}, and {_gb(free)} are free"
        return free >= need

    def _tell_cost(self, seconds: float, rows: int) -> None:
        if self._told_cost:
            return
        self._told_cost = True
        if self.trainer.args.process_index == 0:
            logger.warning(
                "kl-guard: the probe measures KL against %s in one step of %d; it took %.3g s for %d completions",
                self.kind,
                self.every,
                seconds,
                rows,
            )

    @property
    def _policy(self) -> nn.Module:
        model: nn.Module = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return model

    @property
    def _has_adapter(self) -> bool:
        return hasattr(self._policy, "peft_config") and hasattr(self._policy, "disable_adapter")


def put_aside_initial(folder: Path) -> None:
    """At a fresh start: initial weights of an earlier run in the same folder are not those of this one."""
    path = folder / NAME
    if path.is_file():
        path.rename(unused(path))


@contextmanager
def _trainable_as_it_is(model: nn.Module) -> Iterator[None]:
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, was in trainable:
            if parameter.requires_grad != was:
                parameter.requires_grad_(was)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _trains_biases(policy: Any) -> bool:
    return any(getattr(one, "bias", "none") not in {"none", None} for one in policy.peft_config.values())


def _copy_to_cpu(model: nn.Module) -> nn.Module:
    """Return a copy whose tensors are on the CPU, without a second copy on the device in between."""
    known: dict[int, Any] = {}
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(parameter.detach().cpu().clone(), requires_grad=False)
    for buffer in model.buffers():
        known[id(buffer)] = buffer.detach().cpu().clone()
    copied = copy.deepcopy(model, known)
    for module in copied.modules():
        module.__dict__.pop("forward", None)  # put there by TRL or accelerate, it would run the original
    return copied


def _takes(model: nn.Module, name: str) -> bool:
    forward: Callable[..., Any] = model.forward
    return name in inspect.signature(forward).parameters


def _bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _free_memory() -> int | None:
    """Return the bytes of main memory that are available; None where the system does not say."""
    try:
        with Path("/proc/meminfo").open() as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
