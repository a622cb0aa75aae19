"""What a training step has logged, read from the trainer: new values only, under usual names or the user's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

OWN = "kl_guard/"
USUAL: Mapping[str, tuple[str, ...]] = {
    "kl_mean": ("kl_mean", "kl", "kl_ref", "ref_kl", "approx_kl_ref"),
    "kl_max": ("kl_max",),
    "reward": ("reward", "reward_mean", "mean_reward", "rewards"),
    "reward_std": ("reward_std",),
    "entropy": ("entropy", "entropy_mean"),
    "loss": ("loss", "train_loss"),
    "grad_norm": ("grad_norm", "grad_2.0_norm_total", "grad_norm_total"),
    "learning_rate": ("learning_rate", "lr"),
    "beta": ("beta", "kl_beta", "kl_coef"),
}
"""Names under which modules log what an observation holds; each also with `train/` or `train_` before it."""

LARGEST = frozenset({"kl_max"})


class Usual(str):
    """A name that was not chosen by the user: others are as good, and it may be missing."""

    __slots__ = ()


class Logged:
    """Reads the metrics of each batch, and puts those of the batches of one optimizer step together.

    The trainer keeps metrics of earlier steps among its `callback_metrics`. A value counts where it was put there since
    the batch began: Lightning stores each one that is logged in memory of its own.

    Parameters
    ----------
    kl_mean, kl_max:
        Names to look for; a `Usual` one may be missing, and others are tried as well.
    """

    def __init__(self, kl_mean: str, kl_max: str) -> None:
        self.asked = {"kl_mean": kl_mean, "kl_max": kl_max}
        self._before: dict[str, Any] = {}
        self._values: dict[str, list[torch.Tensor]] = {}
        self._settled = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.asked})"

    def begin_batch(self, metrics: Mapping[str, Any]) -> None:
        """Remember what is there before the batch."""
        self._before = dict(metrics)

    def take_batch(self, metrics: Mapping[str, Any]) -> list[str]:
        """Take in what the batch has logged; return the names of all that it has."""
        fresh = {
            name: value
            for name, value in metrics.items()
            if not name.startswith(OWN) and isinstance(value, torch.Tensor) and _is_new(value, self._before.get(name))
        }
        for metric in USUAL:
            name = self._name_of(metric, fresh)
            if name is not None:
                self._values.setdefault(metric, []).append(fresh[name])
        self._before = {}
        return sorted(fresh)

    def missing(self, fresh: Iterable[str], *, tokens: bool) -> tuple[str, str]:
        """Return, once something was logged, an error and a warning about names that are not there ("" for none).

        `tokens` says that KL is measured from the tokens of the step, so that nothing has to be logged.
        """
        there = list(fresh)
        if self._settled or not there:
            return "", ""
        self._settled = True
        names = ", ".join(map(repr, there))
        error = "; ".join(
            f"{metric}={str(name)!r} is not logged by the training step; there are: {names}"
            for metric, name in self.asked.items()
            if not isinstance(name, Usual) and not _forms(name) & set(there)
        )
        unseen = not tokens and not any(name in there for usual in USUAL["kl_mean"] for name in _forms(usual))
        warning = ""
        if unseen and isinstance(self.asked["kl_mean"], Usual):
            warning = (
                f"the training step logs no KL under a usual name ({', '.join(USUAL['kl_mean'])}), so a blow-up cannot "
                f"be seen; there are: {names}. Name it with KLGuardCallback(kl_mean=...), or let training_step return "
                f"'policy_logprobs', 'ref_logprobs' and 'mask' beside the loss"
            )
        return error, warning

    def end_step(self) -> dict[str, float]:
        """Return the values of the optimizer step: the mean over its batches, of maxima the largest; and begin anew."""
        values, self._values = self._values, {}
        return {metric: _together([float(v) for v in taken], metric in LARGEST) for metric, taken in values.items()}

    def forget(self) -> None:
        """Drop what belongs to a step that was not finished."""
        self._values = {}

    def _name_of(self, metric: str, fresh: Mapping[str, Any]) -> str | None:
        asked = self.asked.get(metric)
        usual = USUAL[metric] if asked is None or isinstance(asked, Usual) else (asked,)
        names = [*usual, *(f"{before}{name}" for before in ("train/", "train_") for name in usual)]
        return next((name for name in names if name in fresh), None)


def _forms(name: str) -> set[str]:
    return {name, f"train/{name}", f"train_{name}"}


def _is_new(value: torch.Tensor, before: Any) -> bool:
    if value.numel() != 1:
        return False
    return not isinstance(before, torch.Tensor) or value.data_ptr() != before.data_ptr()


def _together(values: list[float], largest: bool) -> float:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    return max(known) if largest else sum(known) / len(known)
