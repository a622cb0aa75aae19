"""What checkpoint callbacks remember, after the run has gone back: they must not count on files that are gone."""

from __future__ import annotations

import os
from typing import Any

from kl_guard_lightning import internals
from kl_guard_lightning.base import saves_checkpoints
from kl_guard_torch import ranks


def forget_what_is_gone(trainer: Any) -> None:
    """Let checkpoint callbacks forget files that are not there: their memory is as old as the checkpoint.

    It came back with it, and rotation went on after it was saved. On all ranks; what rank 0 sees counts.
    """
    for callback in trainer.callbacks:
        if not saves_checkpoints(callback):
            continue
        internals.went_back(callback, int(trainer.global_step))
        best: dict[str, Any] = getattr(callback, "best_k_models", None) or {}
        paths = [*best, getattr(callback, "best_model_path", ""), getattr(callback, "last_model_path", "")]
        gone = set(
            ranks.gather([path for path in paths if path and "://" not in path and not os.path.lexists(path)])[0]
        )
        if not gone:
            continue
        for path in gone & set(best):
            del best[path]
        choose = {"min": (min, max), "max": (max, min)}[getattr(callback, "mode", "min")]
        if best:
            callback.best_model_path = choose[0](best, key=best.__getitem__)
            callback.best_model_score = best[callback.best_model_path]
            callback.kth_best_model_path = choose[1](best, key=best.__getitem__)
            callback.kth_value = best[callback.kth_best_model_path]
        else:
            for name in ("best_model_path", "kth_best_model_path"):
                if getattr(callback, name, "") in gone:
                    setattr(callback, name, "")
        if getattr(callback, "last_model_path", "") in gone:
            callback.last_model_path = ""
