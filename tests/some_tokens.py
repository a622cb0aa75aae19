"""Tokens of a step as plain numbers, without torch."""

from __future__ import annotations

from dataclasses import replace

from kl_guard.token_stats import Outlier, TokenStats

TEMPLATE = TokenStats(
    tokens=4096,
    parts=1,
    kl_mean=0.02,
    kl_token_mean=0.02,
    k1_mean=0.001,
    k2_mean=0.02,
    kl_max=1.5,
    log_ratio_max=1.2,
    log_ratio_min=-1.1,
    nans=0,
    infs=0,
    quantiles={0.5: 0.001, 0.9: 0.02, 0.99: 0.3, 0.999: 1.0},
    top_share=0.1,
    top_percent_share=0.3,
    kl_trimmed=0.018,
    end_share=0.01,
    place_share=0.05,
    id_share=0.02,
    id_of_share=7,
    padding=None,
    places=tuple((2**i - 1, 64, 0.5) for i in range(8)),
    outliers=tuple(Outlier(1.5 / (i + 1), -3.0 - i, -1.0, 100 + i, 3 * i, i, prompt="What is it?") for i in range(16)),
)


def stats(kl: float = 0.02, kl_max: float = 1.5) -> TokenStats:
    """A step with this KL: some 2.5 kB in `tokens.jsonl`."""
    first = replace(TEMPLATE.outliers[0], kl=kl_max)
    return replace(
        TEMPLATE,
        kl_mean=kl,
        kl_token_mean=kl,
        kl_trimmed=0.9 * kl,
        kl_max=kl_max,
        outliers=(first, *TEMPLATE.outliers[1:]),
    )
