"""What a restored state is compared with: every tensor counts, nothing else does."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_guard_torch.facts import differences, facts_of, fingerprint, optimizer_steps
from kl_guard_trl.internals import forget_rollouts


def net(dtype=torch.float32):
    """A small module with buffers, a frozen and an empty parameter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0)))
    model[0].weight.requires_grad_(False)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_bit_of_any_tensor_changes_it(dtype):
    """Parameters, frozen ones, buffers; and a copy has the same."""
    model = net(dtype)
    before = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == before
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel() == 0:
            continue
        changed = copy.deepcopy(model)
        target = dict([*changed.named_parameters(), *changed.named_buffers()])[name]
        target.data.view(-1).view(torch.uint8)[-1] ^= 1
        assert fingerprint(changed) != before, name


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=50), st.booleans())
def test_the_same_values_have_the_same_sum(values, transposed):
    """NaN, infinities and negative zero included, and however they lie in memory."""
    tensor = torch.tensor([values, values])
    one, other = torch.nn.Module(), torch.nn.Module()
    one.register_buffer("x", tensor)
    other.register_buffer("x", tensor.t().contiguous().t() if transposed else tensor.clone())
    assert fingerprint(one) == fingerprint(other)


def test_parts_in_each_others_place_count():
    """A large tensor whose halves are swapped, as by shards that were loaded by the wrong rank."""
    one, other = torch.nn.Module(), torch.nn.Module()
    tensor = torch.arange(10_000.0)
    one.register_buffer("x", tensor)
    other.register_buffer("x", tensor.roll(4096))
    assert fingerprint(one) != fingerprint(other)


def test_swapped_tensors_and_names_count():
    """Two tensors of one shape in each other's place, a name, a dtype."""
    a, b = torch.arange(4.0), torch.arange(4.0) + 1

    def module(**tensors):
        made = torch.nn.Module()
        for name, tensor in tensors.items():
            made.register_buffer(name, tensor)
        return fingerprint(made)

    assert len({module(x=a, y=b), module(x=b, y=a), module(x=a, z=b), module(x=a.double(), y=b)}) == 4


def trained(steps, optimizer_class=torch.optim.AdamW, **options):
    """A model after some steps, with its optimizer and scheduler."""
    model = net()
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for _ in range(steps):
        model(torch.ones(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


@pytest.mark.parametrize(
    ("optimizer", "counted"), [(torch.optim.AdamW, 3), (torch.optim.Adagrad, 3), (torch.optim.SGD, None)]
)
def test_optimizer_steps(optimizer, counted):
    """Counted where the optimizer counts; with SGD there is nothing to compare, and nothing fails."""
    state = trained(3, optimizer)
    assert optimizer_steps(state[1]) == counted
    facts = facts_of(*state, 3)
    assert list(differences(facts, facts_of(*state, 3), 1.0)) == []


def test_each_difference_is_named():
    """By the name of its check, with what was expected and what is there."""
    before, after = facts_of(*trained(3), 3), facts_of(*trained(4), 4)
    failed = [text.split(":")[0] for text in differences(before, after, 1.0)]
    assert failed == ["global step", "weights", "optimizer steps", "learning rate", "scheduler"]
    assert "optimizer steps: 3 was expected, 4 is there" in list(differences(before, after, 1.0))
    halved = {**before, "learning rate": [0.05 * 0.9**3], "base learning rate": [0.05]}
    assert list(differences(before, halved, 0.5)) == []
    assert len(list(differences(before, halved, 0.4))) == 2
    assert list(differences(before, {}, 1.0))


def test_rollouts_of_the_abandoned_policy_are_dropped():
    """All that GRPO and RLOO keep between steps, whichever of it a version has."""
    from collections import defaultdict, deque
    from types import SimpleNamespace

    trainer = SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=4),
        _step=99,
        _buffered_inputs=[1],
        _last_loaded_step=24,
        _entropy_window_stats=3,
        _metrics={"train": defaultdict(list, kl=[1.0]), "eval": defaultdict(list, kl=[2.0])},
        _pending_metrics=defaultdict(list, x=[1]),
        _logs={"prompt": deque(["a"]), "rewards": {"r": deque([1])}},
    )
    forget_rollouts(trainer, 10)
    assert trainer._step == 40
    assert trainer._buffered_inputs is None
    assert trainer._last_loaded_step == -1
    assert trainer._entropy_window_stats is None
    assert (dict(trainer._metrics["train"]), dict(trainer._metrics["eval"])) == ({}, {"kl": [2.0]})
    assert not trainer._pending_metrics
    assert not trainer._logs["prompt"]
    assert not trainer._logs["rewards"]["r"]
    bare = SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=1))
    forget_rollouts(bare, 10)
    assert vars(bare).keys() == {"args"}
