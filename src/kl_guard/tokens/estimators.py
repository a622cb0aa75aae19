"""KL of policy and reference at each token, estimated from the log-prob of the token that was sampled."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

SERIES = 0.5  # up to this log-ratio k3 is summed as a series: the difference of exp and a line would cancel
_TERMS = {torch.float32: 8, torch.float64: 15}  # what is left out is below the rounding of the type


def per_token_kl(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Estimator = "k3",
    log_ratio_clip: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the estimated KL(policy || reference) of each sampled token, in nats.

    With x = ref_logprobs - policy_logprobs of a token sampled from the policy:

    - k1 = -x: unbiased, of either sign, of high variance;
    - k2 = x**2 / 2: biased, never negative;
    - k3 = exp(x) - 1 - x: unbiased, never negative; grows exponentially where the reference likes a token more than the
      policy does.

    Computed in float32, or in float64 where an input is; k3 is accurate to its last digits also near 0. Where exp
    overflows (x above 88.7 in float32) k3 is inf, and so is its gradient: clip, or give float64.

    Parameters
    ----------
    policy_logprobs, ref_logprobs:
        Log-probs of the sampled tokens, of the same shape, such as [batch, tokens]; any floating type.
    estimator:
        "k1", "k2" or "k3".
    log_ratio_clip:
        x is clipped to +- this many nats before anything else (20 is common); no gradient passes where it was. None for
        no clipping.
    mask:
        Tokens that count, of the same shape, bool or 0 and 1. The others get 0 and pass no gradient, whatever they
        hold: multiplying by a mask afterwards would turn inf into NaN.

    Returns
    -------
    Tensor
        KL of each token in nats, of the inputs' shape, float32 or float64; gradients flow to both inputs.

    Raises
    ------
    TypeError
        For an input that is no tensor of floating-point numbers.
    ValueError
        For shapes that differ, an unknown estimator, or a clip that is not above 0.

    References
    ----------
    J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html

    Examples
    --------
    >>> policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    >>> per_token_kl(policy, reference, "k1").tolist()
    [0.5, -1.0]
    >>> [round(value, 4) for value in per_token_kl(policy, reference).tolist()]
    [0.1065, 0.7183]
    """
    check_logprobs(policy_logprobs, ref_logprobs)
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator must be one of {', '.join(map(repr, get_args(Estimator)))}, got {estimator!r}")
    if log_ratio_clip is not None and not (_is_number(log_ratio_clip) and log_ratio_clip > 0):
        raise ValueError(f"log_ratio_clip must be a number above 0, or None, got {log_ratio_clip!r}")
    log_ratio = log_ratio_of(policy_logprobs, ref_logprobs)
    if mask is not None:
        check_mask(mask, policy_logprobs)
        log_ratio = torch.where(mask.to(torch.bool), log_ratio, 0.0)
    if log_ratio_clip is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clip, log_ratio_clip)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    kl: Tensor = _K3.apply(log_ratio)  # type: ignore[no-untyped-call]  # of torch
    return kl


def k3(x: Tensor) -> Tensor:
    """Return exp(x) - 1 - x without cancellation, for float32 or float64."""
    series = torch.full_like(x, 1.0)
    for n in range(_TERMS.get(x.dtype, 8) + 1, 2, -1):
        series = torch.addcmul(torch.ones_like(x), series, x, value=1 / n)
    near = 0.5 * x * x * series
    far = torch.where(x == math.inf, math.inf, torch.expm1(x) - x)
    return torch.where(x.abs() <= SERIES, near, far)


class _K3(torch.autograd.Function):
    """k3 of the log-ratio; its derivative is exp(x) - 1. Keeps one tensor for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return k3(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.expm1(x)


def log_ratio_of(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return reference minus policy, in float32 or float64."""
    dtype = torch.promote_types(torch.promote_types(policy_logprobs.dtype, ref_logprobs.dtype), torch.float32)
    return ref_logprobs.to(dtype) - policy_logprobs.to(dtype)


def check_logprobs(policy_logprobs: Tensor, ref_logprobs: Tensor) -> None:
    """Refuse what are no log-probs of the same tokens."""
    for name, value in (("policy_logprobs", policy_logprobs), ("ref_logprobs", ref_logprobs)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a tensor of floating-point numbers, got {got}")
    if policy_logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"policy_logprobs and ref_logprobs must have the same shape, got {tuple(policy_logprobs.shape)} and "
            f"{tuple(ref_logprobs.shape)}"
        )
    if policy_logprobs.device != ref_logprobs.device:
        raise ValueError(
            f"policy_logprobs and ref_logprobs must be on the same device, got {policy_logprobs.device} and "
            f"{ref_logprobs.device}"
        )


def check_mask(mask: Tensor, logprobs: Tensor, name: str = "mask") -> None:
    """Refuse what is no mask, or no token ids, of these log-probs."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if mask.shape != logprobs.shape:
        raise ValueError(
            f"{name} must have the shape of the log-probs, got {tuple(mask.shape)} and {tuple(logprobs.shape)}"
        )
    if mask.device != logprobs.device:
        raise ValueError(f"{name} must be on the device of the log-probs, got {mask.device} and {logprobs.device}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
