"""After a rollback, and after a resume in a fresh process: the same weights, moments, random state, on every rank."""

from pathlib import Path

import pytest

from launch import launch

DEEPSPEED = Path(__file__).parent.parent.parent / ".deepspeed"  # made by `make test`; beside the venv, not in it
# On several processes without accelerators transformers 4.56 cannot resume with torch 2.13 (a location "cpu:0").
STRATEGIES = [
    "single",
    pytest.param("ddp", marks=pytest.mark.newest),
    pytest.param("fsdp", marks=pytest.mark.newest),
    pytest.param("zero2", marks=pytest.mark.newest),
    pytest.param("zero3", marks=pytest.mark.newest),
]


def run(modes, strategy, fitted, tmp_path):
    """Train in fresh processes, one mode after the other; return for each a result per rank, and the other output."""
    zero = strategy.startswith("zero")
    if zero and not DEEPSPEED.exists():
        pytest.skip("no DeepSpeed; `make test` installs it to .deepspeed")
    processes = 1 if strategy == "single" else 2
    path = [DEEPSPEED] if zero else []
    results, errors = launch("exact.py", ",".join(modes), strategy, fitted, tmp_path, processes=processes, path=path)
    assert len(results) == processes * len(modes)
    results.sort(key=lambda result: result["rank"])
    return [[result for result in results if result["mode"] == mode] for mode in modes], errors


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rollback_is_a_resume_in_a_fresh_process(fitted, tmp_path, strategy):
    """With nothing changed, bit for bit; what the last rank alone sees takes every rank back.

    With what is changed by default the learning rate is halved in every later step, and beta doubled, on every rank.
    FSDP and ZeRO-2 resume in a fresh trainer of the same processes, whose start takes most of the time.
    """
    modes = ["resume"] if strategy == "single" else ["resume", "changed"]
    if strategy in {"fsdp", "zero2"}:
        (guarded, resumed, *changed), errors = run(["guarded", *modes], strategy, fitted, tmp_path)
    else:
        (guarded,), errors = run(["guarded"], strategy, fitted, tmp_path)
        (resumed, *changed), _ = run(modes, strategy, fitted, tmp_path)
    kind = {"single": "NO", "ddp": "MULTI_CPU", "fsdp": "FSDP"}.get(strategy, "DEEPSPEED")
    for one, other in zip(guarded, resumed, strict=True):
        assert one["type"].endswith(kind)
        assert not one["halted"], one["note"]
        ((alarm, target, facts),) = one["rollbacks"]
        assert (alarm, target) == (10, 4)
        assert {"weights", "optimizer steps", "learning rate", "scheduler", "global step"} <= set(facts)
        assert one["steps"] == [*range(1, 11), *range(5, 15)]
        assert other["steps"] == list(range(5, 15))
        assert {step: one["states"][step] for step in other["states"]} == other["states"]
    if strategy != "single":
        assert guarded[0]["states"]["14"][2] != guarded[1]["states"]["14"][2]  # each rank has its own random state
    assert "back at step 4 (attempt 1)" in errors
    for result in changed[0] if changed else ():
        for step, rate in result["rates"].items():
            usual = 3e-4 * (1 - (int(step) - 1) / 14)
            assert rate == pytest.approx(usual * (0.5 if int(step) > 4 else 1)), step
        assert result["beta"] == pytest.approx(0.2)
        assert result["steps"] == [*range(1, 11), *range(5, 15)]


@pytest.mark.newest
def test_a_fault_on_one_rank_leaves_nobody_waiting(fitted, tmp_path):
    """Every rank goes on or stops at the same step; what cannot be gone back to is halted."""
    modes = ["no guard", "no start", "no save"]
    for mode, results in zip(modes, run(modes, "ddp", fitted, tmp_path)[0], strict=True):
        assert results[0]["steps"] == results[1]["steps"], mode
        assert results[0]["halted"] == results[1]["halted"] == (mode == "no guard"), mode
        assert results[0]["steps"][-1] == (10 if mode == "no guard" else 14), mode


@pytest.mark.newest
def test_a_rank_that_cannot_load_ends_the_run(fitted, tmp_path):
    """The others wait for it in the trainer: its error must end its process, so that the launcher ends theirs."""
    with pytest.raises(AssertionError, match="ChildFailedError"):
        launch("exact.py", "no load", "ddp", fitted, tmp_path, timeout=120)
