"""What to do about a finding: halt, or go back, and why not."""

from __future__ import annotations

from collections.abc import Callable

from kl_guard.checkpoints import Keeper
from kl_guard.config import GuardConfig
from kl_guard.detectors import RestoredKL
from kl_guard.findings import Checkpoint, Finding, Step
from kl_guard.history import History
from kl_guard.memory import Failure, Memory

SAME = 3  # observations between two departures that count as the same place: an estimate may be that far off


def choose(
    config: GuardConfig, memory: Memory, reason: Finding, target: Checkpoint | None, *, hopeless: str
) -> tuple[Step, str]:
    """Return what to do about `reason`, and why it is not what was configured ("" where it is).

    Parameters
    ----------
    config, memory:
        The knobs, and what is known of the run.
    reason:
        The finding that asks for an action.
    target:
        The checkpoint to go back to, where there is one.
    hopeless:
        Why no checkpoint is better than the present state, "" where one may be.
    """
    if config.action != "rollback":
        return "halt", ""
    why = _why_not_back(config, memory, reason, target, hopeless)
    return ("halt", f"not going back: {why}") if why else ("rollback", "")


def _why_not_back(
    config: GuardConfig, memory: Memory, reason: Finding, target: Checkpoint | None, hopeless: str
) -> str:
    again = same_place(memory.failures, reason, memory.history)
    if reason.signature == RestoredKL.signature:
        return "the check of the first KL failed: it is still far above what was recorded at that checkpoint"
    if hopeless and reason.signature != "KL_NONFINITE":
        return hopeless
    if again is not None:
        return (
            f"{place_of(again)} it had failed before, and it did so again in spite of the rollback: the cause is in "
            f"the data of that step, in a schedule, or in the code. Look at that batch (and leave it out), and at what "
            f"changes there"
        )
    if memory.rollbacks >= config.max_rollbacks:
        spent = ", ".join(place_of(failure) for failure in memory.failures[-config.max_rollbacks :])
        return f"all {config.max_rollbacks} rollbacks are used up" + (f" (earlier failures: {spent})" if spent else "")
    if target is None:
        return "there is no checkpoint from before the departure"
    return ""


def target(config: GuardConfig, memory: Memory, checkpoints: Keeper, reason: Finding) -> Checkpoint | None:
    """Return the checkpoint to go back to for `reason`, None where there is none.

    KL logged at a step shows the weights of the step before, so the update before the departure is suspect already.
    """
    departure = reason.step if reason.departure_step is None else reason.departure_step
    index = memory.history.index(departure)
    first = memory.history[index].first_step if index < len(memory.history) else departure
    behind = first - 1 - config.rollback_margin
    return checkpoints.newest_before(behind, now=reason.step, good=before_the_trouble(config, memory, reason))


def before_the_trouble(config: GuardConfig, memory: Memory, reason: Finding | None) -> Callable[[Checkpoint], bool]:
    """Return a test of checkpoints: whether KL was still below what `reason` calls trouble, warm-up or not.

    A departure is an estimate. Where KL had risen early and crawled since, it may be dated into the trouble.
    """
    baseline = reason.evidence.get("baseline") if reason is not None else None
    if not isinstance(baseline, (int, float)):
        return lambda _: True
    limit = max(config.abs_floor, config.ratio * baseline)

    def test(checkpoint: Checkpoint) -> bool:
        recorded = memory.recorded_kl(checkpoint.step)
        return recorded is None or recorded < limit

    return test


def same_place(failures: list[Failure], reason: Finding, history: History) -> Failure | None:
    """Return an earlier failure at the same step: the same departure as far as it can be told, or the same alarm."""
    index = history.index(reason.step)
    window = history[index].window if index < len(history) else 1
    for failure in reversed(failures):
        exact = failure.signature == reason.signature == "KL_NONFINITE"  # a bad batch: there is nothing to estimate
        if exact or failure.departure is None or reason.departure_step is None:
            same = failure.step == reason.step
        else:
            same = abs(failure.departure - reason.departure_step) <= SAME * window
        if same:
            return failure
    return None


def place_of(failure: Failure) -> str:
    """Return where an attempt failed, in words."""
    return f"at step {failure.step if failure.departure is None else failure.departure}"
