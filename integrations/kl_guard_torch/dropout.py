"""Which modules of a model drop out: what makes the same policy another model at each forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_RATES = ("attention_dropout", "attn_dropout", "activation_dropout", "dropout", "resid_pdrop", "attn_pdrop")


def dropping(model: nn.Module, *, in_training: bool = False) -> Iterator[str]:
    """Yield the modules whose rate is above 0, with the rate; with `in_training`, those in training mode only."""
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            continue  # acts on the adapter only, which adds nothing at the start
        rate = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else None
        if rate is None:
            rates = [getattr(module, attribute, None) for attribute in _RATES]
            rate = next((r for r in rates if isinstance(r, float)), 0.0)
        if rate > 0 and (module.training or not in_training):
            yield f"{name} (p = {rate:g})"


def some(names: list[str]) -> str:
    """Return the first three of them, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
