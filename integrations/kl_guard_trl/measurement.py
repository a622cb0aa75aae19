"""How the trainer measures KL: what is unlike between policy and reference, and whether the reference stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kl_guard_torch.dropout import dropping, some
from kl_guard_trl import internals
from kl_guard_trl.reference import moves

ELEMENTS = 64  # of a tensor that are looked at
TENSORS = 32  # that are looked at, spread over the model
CLOSE = 1e-2  # relative; bfloat16 keeps 3 digits


def facts_of(trainer: Any, *, fresh: bool) -> dict[str, Any]:
    """Return what of the set-up may make KL wrong, in words; see `kl_guard.diagnosis` for the names.

    Parameters
    ----------
    trainer:
        A `GRPOTrainer` or `RLOOTrainer`.
    fresh:
        Whether the policy is the one that the run started from.
    """
    model = _unwrapped(trainer)
    found = {
        "dropout": _dropout(model, getattr(trainer, "ref_model", None)),
        "reference_trainable": _trained_reference(trainer, model),
        "unlike": _unlike(trainer, model),
    }
    if fresh and not internals.is_sharded(trainer):
        found["reference_differs"] = _differs(trainer, model)
        found["adapter"] = _adapter(trainer, model)
    return {name: text for name, text in found.items() if text}


@torch.no_grad()
def reference_checksum(trainer: Any) -> float | None:
    """Return a sum over some of the reference's parameters; None where there is none, or it moves on purpose.

    With an adapter, the reference is made of the base model's parameters, and of its own adapter where it has one.
    """
    if moves(trainer) or internals.is_sharded(trainer):
        return None
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        parameters = list(reference.parameters())
    else:
        model = _unwrapped(trainer)
        if not hasattr(model, "peft_config"):
            return None
        policy = {name for name, p in model.named_parameters() if p.requires_grad}
        parameters = [p for name, p in model.named_parameters() if name not in policy]
    samples = [_sample(p) for p in _spread(parameters)]
    if not samples:
        return None
    weights = [torch.arange(1, len(s) + 1, device=s.device, dtype=torch.float32) for s in samples]
    sums = [torch.dot(s.float(), w) for s, w in zip(samples, weights, strict=True)]
    return float(torch.stack(sums).double().sum().item())


def _unwrapped(trainer: Any) -> nn.Module:
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    return model


def _dropout(model: nn.Module, reference: Any) -> str:
    """Name the modules that drop out while log-probs are computed: TRL scores the policy in training mode."""
    text = some(list(dropping(model)))
    if reference is not None and any(module.training for module in reference.modules()) and any(dropping(reference)):
        text += f"{'; ' if text else ''}the reference is in training mode and drops out too"
    return text


def _trained_reference(trainer: Any, model: nn.Module) -> str:
    reference = getattr(trainer, "ref_model", None)
    if reference is None or internals.is_sharded(trainer):
        return ""
    policy = {id(p) for p in model.parameters()}
    shared = [name for name, p in reference.named_parameters() if id(p) in policy]
    if shared:
        return f"policy and reference share parameters: {some(shared)}"
    optimizer = getattr(trainer, "optimizer", None)
    trained = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    in_optimizer = [name for name, p in reference.named_parameters() if id(p) in trained]
    return f"the optimizer holds parameters of the reference: {some(in_optimizer)}" if in_optimizer else ""


def _unlike(trainer: Any, model: nn.Module) -> str:
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        return ""
    ours, theirs = next(model.parameters(), None), next(reference.parameters(), None)
    if ours is None or theirs is None:
        return ""
    pairs = [(str(ours.dtype), str(theirs.dtype)), (f"on {ours.device.type}", f"on {theirs.device.type}")]
    return "; ".join(f"the policy is {a}, the reference {b}" for a, b in pairs if a != b)


@torch.no_grad()
def _differs(trainer: Any, model: nn.Module) -> str:
    """Say how many of the parameters looked at differ between policy and reference, before the first step."""
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        return ""
    theirs = dict(reference.named_parameters())
    both = [(name, p) for name, p in model.named_parameters() if name in theirs]
    looked = _spread(both)
    if not looked:
        return ""
    unlike = [name for name, p in looked if not _alike(p, theirs[name])]
    if not unlike:
        return ""
    return f"before the first step {len(unlike)} of {len(looked)} tensors looked at differed, {unlike[0]} for one"


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    a, b = _sample(ours).float().cpu(), _sample(theirs).float().cpu()
    return bool(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * float(a.abs().mean())))


@torch.no_grad()
def _adapter(trainer: Any, model: nn.Module) -> str:
    """Say where the policy started with an adapter that the reference does not have."""
    if getattr(trainer, "ref_model", None) is not None or not hasattr(model, "peft_config"):
        return ""
    adapters: Any = model.peft_config
    if "ref" in adapters or internals.beta_of(trainer) == 0:
        return ""
    moved = [name for name, p in model.named_parameters() if "lora_B" in name and p.requires_grad and p.any()]
    if not moved:
        return ""
    return (
        f"the reference is the model with its adapter off, but the adapter was not empty at the start ({moved[0]} and "
        f"{len(moved) - 1} more were not 0)"
    )


def _spread(items: list[Any]) -> list[Any]:
    """Return some of a list, spread over it."""
    every = max(1, len(items) // TENSORS)
    return items[::every]


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, spread over it."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
