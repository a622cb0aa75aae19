"""rlwatch, which compares each value with limits and with the last 100."""

from __future__ import annotations

import importlib
import importlib.metadata
import tempfile
from typing import TYPE_CHECKING, Any

from peers.base import Alarm, quiet, renamed, step_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RLWATCH_FIELDS = {
    "kl": "kl_divergence",
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "loss": "loss",
}


class RLWatch:
    """rlwatch in its manual mode: `log_step` per step, which returns the alerts it sent.

    KL is critical above 4.5 and a warning above 3 standard deviations over the mean of the last 100 values, from the
    20th value on. Cooldown and the limit of 50 alerts a run stay on. It never halts by itself; its critical alerts say
    "immediately reduce learning rate" (KL) and "stop the run immediately" (loss). It is built from `RLWatchConfig()`,
    not by `attach`, so that no `rlwatch.yaml` or webhook of this machine takes part.
    """

    name = "rlwatch"
    live = True
    every = 1
    counted: tuple[str, ...] = ("kl_explosion", "loss_nan")

    def __init__(self) -> None:
        self.version = importlib.metadata.version("rlwatch")

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first critical alarm."""
        rlwatch: Any = importlib.import_module("rlwatch")
        warn_step: int | None = None
        with tempfile.TemporaryDirectory(prefix="rlwatch-") as folder, quiet():
            config = rlwatch.RLWatchConfig(run_id="series", framework="manual")
            config.storage.log_dir = folder
            monitor = rlwatch.RLWatch(config)
            monitor.start()
            try:
                for index, row in enumerate(rows):
                    step = step_of(row, index)
                    try:
                        alerts = monitor.log_step(step, **renamed(row, _RLWATCH_FIELDS))
                    except Exception as error:  # whatever a peer raises is its result
                        return Alarm(warn_step=warn_step, error=f"step {step}: {type(error).__name__}: {error}")
                    severities = {alert.severity for alert in alerts if alert.detector in self.counted}
                    if "critical" in severities:
                        return Alarm(step, warn_step)
                    if severities and warn_step is None:
                        warn_step = step
            finally:
                monitor.stop()
        return Alarm(warn_step=warn_step)
