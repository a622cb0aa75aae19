"""What the summary of a batch's tokens costs, against what any KL in float32 costs at least: one exp and one sum.

python benchmarks/tokens.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kl_guard.tokens import per_token_kl, summarize_tokens


def main() -> None:
    """Measure in turn, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=51)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.tokens)
    policy = -5 * torch.rand(shape, generator=generator)
    reference = policy + 0.3 * torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.9
    ids = torch.randint(0, 150_000, shape, generator=generator)
    works: dict[str, Callable[[], object]] = {
        "exp and sum of one input": lambda: policy.exp().sum(),
        "exp and sum of both inputs": lambda: (policy.exp().sum(), reference.exp().sum()),
        "the usual masked mean of k3": lambda: _usual(policy, reference, mask),
        "per_token_kl": lambda: per_token_kl(policy, reference),
        "summarize_tokens": lambda: summarize_tokens(policy, reference, mask, ids),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.repeats):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    print(f"{options.rows} x {options.tokens} float32, {torch.get_num_threads()} threads, median of {options.repeats}")
    summary = statistics.median(seconds["summarize_tokens"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:28s} {1e3 * median:7.3f} ms; the summary takes {summary / median:.2f} times that")


def _usual(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = reference - policy
    return ((x.exp() - x - 1) * mask).sum() / mask.sum()


if __name__ == "__main__":
    main()
