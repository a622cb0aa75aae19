"""summarize_tokens: what it says is what float64 says, however the batch is divided, and nothing waits."""

from __future__ import annotations

import itertools
import math

import naive
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.token_stats import put_together
from kl_guard.tokens import TokenSummary, summarize_tokens
from kl_guard.tokens import summary as module

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def batch(seed, rows=6, width=40, scale=0.3, dtype=torch.float32, kept=0.8, spikes=0):
    """A batch of log-probs, mask and ids; `spikes` of its tokens have a log-ratio up to +- 200."""
    generator = torch.Generator().manual_seed(seed)
    policy = -5 * torch.rand(rows, width, generator=generator)
    reference = policy + scale * torch.randn(rows, width, generator=generator)
    if spikes:
        where = torch.randint(0, rows * width, (spikes,), generator=generator)
        reference.view(-1)[where] += 400 * torch.rand(spikes, generator=generator) - 200
    mask = torch.rand(rows, width, generator=generator) < kept
    ids = torch.randint(0, 50, (rows, width), generator=generator)
    return policy.to(dtype), reference.to(dtype), mask, ids


def compare(stats, expected, tolerance=1e-5):
    """Compare stats with the plain computation."""
    assert stats.tokens == expected["tokens"]
    assert stats.nans == expected["nans"]
    close = {"rel": tolerance, "abs": 1e-7, "nan_ok": True}
    assert stats.kl_token_mean == pytest.approx(expected["mean"], **close)
    assert stats.k1_mean == pytest.approx(expected["k1"], **close)
    assert stats.k2_mean == pytest.approx(expected["k2"], **close)
    assert stats.kl_max == pytest.approx(expected["max"], rel=1e-6, nan_ok=True)
    assert stats.log_ratio_max == pytest.approx(expected["x_max"], rel=1e-6, nan_ok=True)
    assert stats.log_ratio_min == pytest.approx(expected["x_min"], rel=1e-6, nan_ok=True)
    listed = [outlier.kl for outlier in stats.outliers]
    assert listed == pytest.approx(list(expected["order"][: len(listed)]), rel=1e-6, nan_ok=True)
    assert len(listed) == min(16, int((expected["order"] != 0).sum()))
    assert stats.kl_trimmed == pytest.approx(expected["trimmed"], **close)
    assert stats.top_share == pytest.approx(expected["top_share"], **close)
    assert stats.end_share == pytest.approx(expected["end_share"], **close)
    assert {first: count for first, count, _ in stats.places} == {f: n for f, (n, _) in expected["places"].items()}


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    width=st.integers(1, 90),
    scale=st.sampled_from([1e-3, 0.3, 2.0]),
    kept=st.sampled_from([0.0, 0.05, 0.8, 1.0]),
    spikes=st.sampled_from([0, 3]),
)
def test_equals_float64(dtype, seed, rows, width, scale, kept, spikes):
    """Means, maxima, shares, places and the top tokens, for every type of input, empty masks and single tokens."""
    policy, reference, mask, ids = batch(seed, rows, width, scale, dtype, kept, spikes)
    expected = naive.stats(policy.double(), reference.double(), mask)
    stats = summarize_tokens(policy, reference, mask, ids).read()
    compare(stats, expected, tolerance=1e-5 if scale > 1e-2 else 1e-3)
    for outlier in stats.outliers:
        assert outlier.policy_logprob == float(policy[outlier.row, outlier.position])
        assert outlier.ref_logprob == float(reference[outlier.row, outlier.position])
        assert outlier.token_id == int(ids[outlier.row, outlier.position])
        assert mask[outlier.row, outlier.position]


@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 8), max_size=3), spikes=st.sampled_from([0, 5]))
def test_a_divided_batch_says_the_same(seed, cuts, spikes):
    """Micro-batches and ranks: the merge equals the undivided computation, top tokens and histogram exactly."""
    policy, reference, mask, ids = batch(seed, 8, 50, spikes=spikes)
    whole = summarize_tokens(policy, reference, mask, ids).read()
    edges = [0, *sorted(cuts), 8]
    parts = [summarize_tokens(policy[a:b], reference[a:b], mask[a:b], ids[a:b]) for a, b in itertools.pairwise(edges)]
    merged = parts[0].merged(parts[1:]).read()
    assert [o.kl for o in merged.outliers] == [o.kl for o in whole.outliers]
    assert {(o.kl, edges[o.part] + o.row, o.position) for o in merged.outliers} == {
        (o.kl, o.row, o.position) for o in whole.outliers
    }
    assert (merged.tokens, merged.kl_max, merged.log_ratio_min) == (whole.tokens, whole.kl_max, whole.log_ratio_min)
    assert merged.quantiles == whole.quantiles
    for name in ("kl_token_mean", "k1_mean", "k2_mean", "kl_trimmed", "top_share", "top_percent_share", "end_share"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-5, abs=1e-7, nan_ok=True), name
    means = [part.read().kl_token_mean for part in parts if part.read().tokens]
    assert merged.kl_mean == pytest.approx(np.mean(means) if means else math.nan, nan_ok=True)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    width=st.integers(1, 150),
    kept=st.sampled_from([0.1, 0.8, 1.0]),
    ranks=st.integers(1, 3),
)
def test_excerpts_are_what_stands_around_the_largest(seed, rows, width, kept, ranks):
    """Ids and KL of the neighbours, those under the mask marked; nothing of another row; no piece twice."""
    batches = [batch(seed + rank, rows, width, kept=kept, spikes=2) for rank in range(ranks)]
    for _, _, mask, ids in batches:
        ids[~mask & (ids < 10)] = -100  # as labels have it
    summaries = [summarize_tokens(*given, top_k=5) for given in batches]
    stats = put_together(np.concatenate([summary.numpy() for summary in summaries]), range(ranks))
    assert len(stats.excerpts) <= 3
    assert bool(stats.excerpts) == bool(stats.outliers)
    shown = set()
    for excerpt in stats.excerpts:
        largest = stats.outliers[excerpt.outlier]
        policy, reference, mask, ids = (tensor[largest.row] for tensor in batches[largest.part])
        kl = naive.k3((reference - policy).numpy())
        first, last = max(0, largest.position - 40), min(width, largest.position + 24)
        counts = [i for i in range(first, last) if mask[i]]
        assert excerpt.start == counts[0]
        assert excerpt.start + len(excerpt) == counts[-1] + 1
        for i, (token_id, value) in enumerate(zip(excerpt.token_ids, excerpt.kl, strict=True), start=excerpt.start):
            assert token_id == max(0, int(ids[i]))
            assert (value is None) == (not mask[i])
            assert value is None or value == pytest.approx(kl[i], rel=1e-5, abs=1e-7)
        assert (largest.completion, largest.position) not in shown
        shown |= {(largest.completion, excerpt.start + i) for i in range(len(excerpt))}


def test_large_batches_are_searched_in_blocks():
    """More tokens than places in the list, blocks and a remainder: the list is exact, shares and quantiles near."""
    policy, reference, mask, ids = batch(7, 61, 777, scale=0.5)
    expected = naive.stats(policy, reference, mask)
    stats = summarize_tokens(policy, reference, mask, ids).read()
    assert [o.kl for o in stats.outliers] == pytest.approx(expected["order"][:16].tolist(), rel=1e-6)
    assert stats.top_share == pytest.approx(expected["top_share"], rel=0.01)
    assert stats.top_percent_share == pytest.approx(expected["percent_share"], rel=0.01)
    ascending = expected["order"][::-1]
    for q, value in stats.quantiles.items():
        exact = ascending[max(0, math.ceil(q * len(ascending)) - 1)]
        assert value == pytest.approx(exact, rel=0.06), q


def test_the_founding_report():
    """Torchforge issue 664: one token of 22.64 nats among 4,300 makes a mean KL of 1,568,987."""
    policy = torch.full((43, 100), -1.0)
    reference = policy + 0.01
    policy[17, 40] = -23.64
    reference[17, 40] = -1.0
    stats = summarize_tokens(policy, reference, torch.ones(43, 100, dtype=torch.bool)).read()
    assert stats.kl_token_mean == pytest.approx((math.exp(22.64) - 23.64) / 4300, rel=1e-3)
    assert (stats.outliers[0].row, stats.outliers[0].position) == (17, 40)
    assert stats.outliers[0].log_ratio == pytest.approx(22.64, rel=1e-6)
    assert stats.top_share == pytest.approx(1.0)
    assert stats.kl_trimmed == pytest.approx(5e-5, rel=0.01)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("side", ["policy", "reference"])
def test_what_is_not_finite_is_counted_and_listed_first(value, side):
    """NaN and inf show in the counts, in the mean, and as the first of the listed tokens with their place."""
    policy, reference, _, ids = batch(3)
    (policy if side == "policy" else reference)[2, 5] = value
    mask = torch.ones_like(policy, dtype=torch.bool)
    stats = summarize_tokens(policy, reference, mask, ids).read()
    assert (stats.outliers[0].row, stats.outliers[0].position) == (2, 5)
    assert stats.nans + stats.infs == 1
    assert not math.isfinite(stats.kl_token_mean)
    assert math.isnan(stats.kl_max) == math.isnan(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_the_mask_hides_does_not_matter(value):
    """Padding may hold anything."""
    policy, reference, mask, ids = batch(3)
    clean = summarize_tokens(policy, reference, mask, ids).read()
    policy[~mask] = value
    reference[~mask] = -value
    assert summarize_tokens(policy, reference, mask, ids).read() == clean


def test_log_ratios_beyond_float32_are_kept():
    """exp(200) is no float32; the list holds what it is made of, so mean and maximum are known all the same."""
    policy, reference = torch.full((1, 4), -1.0), torch.tensor([[199.0, -1.0, -1.5, -201.0]])
    stats = summarize_tokens(policy, reference, torch.ones(1, 4)).read()
    assert stats.kl_max == pytest.approx(math.exp(200), rel=1e-9)
    assert stats.kl_token_mean == pytest.approx(math.exp(200) / 4, rel=1e-9)
    assert (stats.infs, stats.nans) == (1, 0)
    assert stats.kl_trimmed == pytest.approx((naive.k3(-0.5) + naive.k3(-200.0)) / 3, rel=1e-6)


def test_padding_inside_the_mask_is_counted():
    """Padding behind an end of sequence, not what was sampled; where both are one id, the first is the end itself."""
    ids = torch.tensor([[5, 6, 2, 0, 0], [0, 0, 6, 2, 0]])
    ones, zeros = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 5)
    stats = summarize_tokens(zeros, zeros, ones, ids, pad_token_id=0, eos_token_ids=[2])
    assert stats.read().padding == 3
    same = torch.tensor([[5, 6, 2, 2, 2]])
    stats = summarize_tokens(zeros[:1], zeros[:1], ones[:1], same, pad_token_id=2, eos_token_ids=[2])
    assert stats.read().padding == 2
    assert summarize_tokens(zeros, zeros, ones, ids).read().padding is None


@given(seed=st.integers(0, 10_000), special=st.lists(st.integers(0, 60)), spikes=st.sampled_from([0, 30]))
def test_kl_without_special_tokens(seed, special, spikes):
    """The mean of the others, whether they are listed or not and however the batch is divided."""
    policy, reference, mask, ids = batch(seed, 8, 50, spikes=spikes)
    parts = [
        summarize_tokens(*(t[a : a + 4] for t in (policy, reference, mask, ids)), special_ids=special) for a in (0, 4)
    ]
    plain = mask & ~torch.isin(ids, torch.tensor(special, dtype=ids.dtype))
    expected = naive.stats(policy.double(), reference.double(), plain)["mean"]
    told = parts[0].merged(parts[1:]).read().kl_without_special
    assert told is None if not special else told == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)


def test_positions_and_ids_that_carry_the_mass_are_named():
    """An end of sequence that the reference scores otherwise: the share on last tokens and on that id."""
    policy, reference = torch.full((8, 30), -1.0), torch.full((8, 30), -1.01)
    ids = torch.randint(3, 30, (8, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(8, 30, dtype=torch.bool)
    for row in range(8):
        end = 12 + 2 * row
        mask[row, : end + 1] = True
        ids[row, end], reference[row, end] = 1, -9.0
    stats = summarize_tokens(policy, reference, mask, ids).read()
    assert stats.end_share > 0.99
    assert stats.id_share > 0.99
    assert stats.id_of_share == 1


def test_one_sequence_without_a_batch_axis():
    """[tokens] is one completion."""
    policy, reference, mask, ids = batch(4, 1)
    line = summarize_tokens(policy[0], reference[0], mask[0], ids[0]).read()
    assert line == summarize_tokens(policy, reference, mask, ids).read()


def test_no_tokens_at_all():
    """A batch without tokens is nothing to divide by."""
    empty = torch.zeros(0, 5)
    for policy in (empty, torch.zeros(2, 0), torch.zeros(2, 3)):
        stats = summarize_tokens(policy, policy, torch.zeros_like(policy)).read()
        assert stats.tokens == 0
        assert math.isnan(stats.kl_token_mean)
        assert stats.outliers == ()


def test_no_gradient_passes_and_none_is_kept():
    """A summary holds on to no graph."""
    policy, reference, mask, ids = batch(5)
    policy.requires_grad_()
    assert not summarize_tokens(policy, reference, mask, ids).values.requires_grad


def test_a_strided_batch():
    """Slices, transposes and expanded tensors are read right."""
    policy, reference, mask, ids = batch(6, 8, 60)
    views = [t[::2, 10:50] for t in (policy, reference, mask, ids)]
    copies = [t.contiguous() for t in views]
    assert summarize_tokens(*views).read() == summarize_tokens(*copies).read()


@pytest.mark.parametrize("path", ["count by bincount", "count as on a GPU"])
def test_nothing_waits_for_the_device(monkeypatch, path):
    """No operation whose result decides on the CPU what comes next: those are what synchronises a GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    waits = {"item", "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_to_cpu", "equal", "unique"}
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
                name = "nonzero"
            seen.add(name)
            return function(*args, **(kwargs or {}))

    if path == "count as on a GPU":
        monkeypatch.setattr(module, "_counts", module._counts_by_scatter)
    policy, reference, mask, ids = batch(8, 20, 50)
    with Watch():
        summary = summarize_tokens(policy, reference, mask, ids, pad_token_id=0, eos_token_ids=[1], special_ids=[2])
        summary = summary.merged([summarize_tokens(policy, reference, mask, ids)])
    assert "expm1" in seen
    assert not seen & waits
    assert ("bincount" in seen) == (path == "count by bincount")
    compare(TokenSummary(summary.values[:1]).read(), naive.stats(policy, reference, mask))


def test_only_like_summaries_merge():
    """Another top_k is another layout."""
    policy, reference, mask, _ = batch(9)
    with pytest.raises(ValueError, match="same top_k"):
        summarize_tokens(policy, reference, mask).merged([summarize_tokens(policy, reference, mask, top_k=4)])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask": torch.ones(2, 2)}, ValueError, "mask must have the shape"),
        ({"token_ids": torch.ones(2, 2)}, ValueError, "token_ids must have the shape"),
        ({"top_k": 0}, ValueError, "top_k must be a whole number of at least 1, got 0"),
        ({"top_k": 2.0}, ValueError, "top_k must be a whole number of at least 1, got 2.0"),
        ({"policy_logprobs": None}, TypeError, "policy_logprobs must be a tensor"),
    ],
)
def test_bad_input_is_refused_by_name(change, error, message):
    """The message has the argument, what is allowed and what was given."""
    zeros = torch.zeros(2, 3)
    arguments = {"policy_logprobs": zeros, "ref_logprobs": zeros, "mask": zeros}
    with pytest.raises(error, match=message):
        summarize_tokens(**{**arguments, **change})


def test_rows_of_ranks_keep_their_rank():
    """A token is found again on the process that it came from."""
    policy, reference, mask, ids = batch(10)
    values = summarize_tokens(policy, reference, mask, ids).values.numpy()
    stats = put_together(np.concatenate([values, values]), ranks=[0, 3])
    assert {o.rank for o in stats.outliers} == {0, 3}
