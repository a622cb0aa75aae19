"""Lightning's own two: `EarlyStopping` with a limit, and `SpikeDetection`."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import tempfile
from typing import TYPE_CHECKING, Any

from peers.base import Alarm, quiet, step_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

THRESHOLDS = (0.5, 2.0, 10.0)
FOR_EVER = 10**9


class EarlyStopping:
    """`EarlyStopping(monitor="kl", divergence_threshold=..., check_finite=True)`, looking at each step.

    Without patience it would stop any run whose KL does not fall, so patience is endless. The threshold is the user's
    to choose. What it decides is asked for directly, as its check in a training loop does.
    """

    live = True
    every = 1
    counted: tuple[str, ...] = ("above the threshold", "not finite")

    def __init__(self, threshold: float) -> None:
        self.name = f"Lightning EarlyStopping({threshold:g})"
        self.version = importlib.metadata.version("lightning")
        self._threshold = threshold

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first alarm."""
        torch: Any = importlib.import_module("torch")
        callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
        stopping = callbacks.EarlyStopping(
            monitor="kl", divergence_threshold=self._threshold, check_finite=True, patience=FOR_EVER
        )
        for index, row in enumerate(rows):
            kl = row.get("kl")
            if kl is not None and stopping._evaluate_stopping_criteria(torch.tensor(kl))[0]:
                return Alarm(step_of(row, index))
        return Alarm()


class SpikeDetection:
    """Fabric's `SpikeDetection` with its defaults, given KL instead of a loss: twice the mean of the last 10 stops.

    It halts on a value that is not finite, too.
    """

    name = "Lightning SpikeDetection"
    live = True
    every = 1
    counted: tuple[str, ...] = ("spike", "not finite")

    def __init__(self) -> None:
        self.version = importlib.metadata.version("lightning")

    def run(self, rows: Sequence[Mapping[str, float | None]]) -> Alarm:
        """Feed the rows one by one and stop at the first alarm."""
        torch: Any = importlib.import_module("torch")
        fabric: Any = importlib.import_module("lightning.fabric")
        spike: Any = importlib.import_module("lightning.fabric.utilities.spike")
        for name in ("lightning.fabric", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with tempfile.TemporaryDirectory(prefix="spikes-") as folder, quiet():
            detection = spike.SpikeDetection(exclude_batches_path=folder)
            host = fabric.Fabric(accelerator="cpu", devices=1)
            seen = 0
            for index, row in enumerate(rows):
                kl = row.get("kl")
                if kl is None:
                    continue
                try:
                    detection.on_train_batch_end(host, torch.tensor(kl), None, seen)
                except spike.TrainingSpikeException:
                    return Alarm(step_of(row, index))
                seen += 1
        return Alarm()
