"""All optimizers and schedulers of a trainer as one, to scale them and to compare them."""

from __future__ import annotations

from typing import Any

from kl_guard_torch.facts import facts_of


class Optimizers:
    """The parameter groups and states of all optimizers of a trainer.

    Attributes
    ----------
    param_groups:
        The optimizers' own, so that a change lasts.
    state:
        By number.
    """

    def __init__(self, trainer: Any) -> None:
        self.param_groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.state = dict(enumerate(states))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(groups={len(self.param_groups)})"


class Schedulers:
    """The learning rate schedulers of a trainer, as a scheduler made of schedulers."""

    def __init__(self, trainer: Any) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._schedulers})"


def facts(trainer: Any, module: Any) -> dict[str, Any]:
    """Return what a restored state of this process is compared with."""
    return facts_of(module, Optimizers(trainer), Schedulers(trainer), int(trainer.global_step))
