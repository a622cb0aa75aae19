"""Peer tools, run live on a recorded series: one observation at a time, each as its documentation sets it up.

Every peer keeps its default thresholds; Lightning's `EarlyStopping` has none, and is asked with several. Only alarms
about the KL divergence and about non-finite numbers count; whatever else a peer watches (entropy, reward, gradient
spikes, ...) is left out, because the labels say nothing about it. The peers are optional: whatever is not installed is
listed by `missing_peers`.

A row maps a column (`step`, `kl`, `kl_max`, `reward`, `reward_std`, `entropy`, `grad_norm`, `learning_rate`, `loss`,
`completion_length`) to its value. None is a metric that was not logged, and NaN is one that was logged as NaN: rlprobe
drops NaN as its TRL callback does, the others receive it.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.base import Alarm, Peer, installed
from peers.lightning import THRESHOLDS, EarlyStopping, SpikeDetection
from peers.rldoctor import RLDoctor
from peers.rlprobe import RLProbe, RLProbeLive, rlprobe_live
from peers.rlwatch import RLWatch

__all__ = ["PINNED", "Alarm", "Missing", "Peer", "RLProbeLive", "available_peers", "missing_peers", "rlprobe_live"]

PINNED = {"rlprobe": "0.1.0", "rlwatch": "0.5.1", "rldoctor": "0.2.0"}
"""The versions that these adapters were written against; Lightning is one of the project's own dependencies."""


@dataclass(frozen=True)
class Missing:
    """A peer that is not installed, or is installed in another version."""

    name: str
    found: str | None

    def __str__(self) -> str:
        state = "is not installed" if self.found is None else f"is installed as {self.found}"
        return f"{self.name} {PINNED[self.name]} {state}: pip install {self.name}=={PINNED[self.name]}"


def available_peers() -> list[Peer]:
    """Return the installed peers, each with every setting that it is asked with."""
    peers: list[Peer] = []
    if installed("rlprobe"):
        peers += [RLProbe(), RLProbe(every=1)]
    if installed("rlwatch"):
        peers.append(RLWatch())
    if installed("rldoctor"):
        peers.append(RLDoctor())
    if installed("lightning"):
        peers += [*(EarlyStopping(threshold) for threshold in THRESHOLDS), SpikeDetection()]
    return peers


def missing_peers() -> list[Missing]:
    """Return the peers that are not installed in the version these adapters were written against."""
    return [Missing(name, installed(name)) for name, version in PINNED.items() if installed(name) != version]
