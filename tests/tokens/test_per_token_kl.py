"""per_token_kl: right to the last digits, with right gradients, and honest about what overflows."""

from __future__ import annotations

import math

import naive
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.tokens import per_token_kl

LOG_RATIOS = st.one_of(st.floats(-200, 200), st.floats(-1, 1), st.floats(-1e-4, 1e-4))
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def pair(log_ratios, dtype):
    """Policy and reference log-probs whose log-ratios are exact in the type."""
    reference = torch.tensor(log_ratios, dtype=dtype)
    return torch.zeros_like(reference), reference


@pytest.mark.parametrize("dtype", DTYPES)
@given(log_ratios=st.lists(LOG_RATIOS, min_size=1, max_size=40))
def test_equals_float64_to_the_last_digits(dtype, log_ratios):
    """Whatever the inputs' type, k1, k2 and k3 are those of float64, rounded: also near 0, where terms cancel."""
    policy, reference = pair(log_ratios, dtype)
    x = reference.double().numpy()
    tolerance = 1e-14 if dtype is torch.float64 else 1e-6
    largest = np.finfo(np.float64 if dtype is torch.float64 else np.float32).max
    for estimator, expected in {"k1": -x, "k2": x**2 / 2, "k3": naive.k3(x)}.items():
        kl = per_token_kl(policy, reference, estimator)
        assert kl.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        fits = expected < largest
        np.testing.assert_allclose(kl.double().numpy()[fits], expected[fits], rtol=tolerance, atol=1e-44)
        assert torch.isinf(kl[torch.from_numpy(~fits)]).all()


def test_overflow_and_nan_are_reported():
    """What float32 cannot hold is inf, NaN stays NaN, and a token that the reference excludes is infinitely far."""
    policy, reference = pair([89.0, math.inf, -math.inf, math.nan, -1e30], torch.float32)
    assert per_token_kl(policy, reference).tolist()[:3] == [math.inf] * 3
    assert math.isnan(per_token_kl(policy, reference)[3])
    assert per_token_kl(policy, reference)[4] == pytest.approx(1e30)
    assert per_token_kl(policy.double(), reference.double())[0] == pytest.approx(math.exp(89), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_are_those_of_the_formula(estimator):
    """Both inputs get the derivative, also to second order, near 0 and far from it."""
    log_ratios = torch.tensor([-3.0, -0.6, -0.4, -1e-3, 0.0, 1e-3, 0.3, 0.7, 4.0], dtype=torch.float64)
    policy = torch.linspace(-2, -0.1, 9, dtype=torch.float64)
    inputs = (policy.requires_grad_(), (policy.detach() + log_ratios).requires_grad_())
    assert torch.autograd.gradcheck(lambda p, r: per_token_kl(p, r, estimator), inputs)
    assert torch.autograd.gradgradcheck(lambda p, r: per_token_kl(p, r, estimator), inputs)


def test_clipped_tokens_pass_no_gradient():
    """A clip bounds the value; what it cut off pulls at nothing."""
    policy = torch.zeros(3, requires_grad=True)
    kl = per_token_kl(policy, torch.tensor([300.0, -50.0, 1.0]), log_ratio_clip=20.0)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([math.expm1(20) - 20, math.expm1(-20) + 20, math.e - 2], rel=1e-6)
    assert policy.grad.tolist() == pytest.approx([0.0, 0.0, 1 - math.e])


def test_masked_tokens_are_zero_and_pass_no_gradient():
    """Padding may hold anything: inf times 0 would be NaN."""
    policy = torch.tensor([[-1.0, -math.inf, math.nan, -2.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -1.0, -2.0]])
    kl = per_token_kl(policy, reference, mask=torch.tensor([[1, 0, 0, 1]]))
    kl.sum().backward()
    assert kl[0, 1:3].tolist() == [0.0, 0.0]
    assert torch.isfinite(policy.grad).all()
    assert policy.grad[0, 1:3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"policy_logprobs": [0.0]}, TypeError, "policy_logprobs must be a tensor of floating-point numbers, got list"),
        ({"ref_logprobs": torch.tensor([1])}, TypeError, "ref_logprobs must be .* got torch.int64"),
        ({"ref_logprobs": torch.zeros(1, 2)}, ValueError, r"same shape, got \(1,\) and \(1, 2\)"),
        ({"estimator": "k4"}, ValueError, "estimator must be one of 'k1', 'k2', 'k3', got 'k4'"),
        ({"log_ratio_clip": 0}, ValueError, "log_ratio_clip must be a number above 0, or None, got 0"),
        ({"log_ratio_clip": True}, ValueError, "log_ratio_clip must be a number above 0, or None, got True"),
        ({"mask": torch.ones(2)}, ValueError, r"mask must have the shape of the log-probs, got \(2,\) and \(1,\)"),
        ({"mask": [True]}, TypeError, "mask must be a tensor, got list"),
    ],
)
def test_bad_input_is_refused_by_name(change, error, message):
    """The message has the argument, what is allowed and what was given."""
    arguments = {"policy_logprobs": torch.zeros(1), "ref_logprobs": torch.zeros(1)}
    with pytest.raises(error, match=message):
        per_token_kl(**{**arguments, **change})
