"""Two ranks over gloo: they stop and go back together, whatever one of them alone sees."""

import pytest

from launch import launch


def run(tmp_path, *modes, processes=2, repeats=1):
    """Train in fresh processes, one mode after the other; return for each its results, and the other output."""
    results, errors = launch(
        "two_ranks.py", ",".join(modes), tmp_path, repeats, processes=processes, timeout=240, folder="lightning"
    )
    assert len(results) == processes * repeats * len(modes)
    results.sort(key=lambda result: (result.get("repeat", 0), result["rank"]))
    return [[result for result in results if result["mode"] == mode] for mode in modes], errors


def check_halts(results):
    for result in results:
        assert result["halted"]
        assert result["ended"] == result["expected"]
        assert result["reason"] == ["KL_BLOWUP", result["expected"]]
        assert result["way_back"] == results[result["repeat"] * 2]["way_back"]


def test_what_one_rank_sees_halts_all(tmp_path):
    """Within the same batch, under min_steps, with an exception asked for, with the other rank's guard broken."""
    check_halts(*run(tmp_path, "halt", repeats=4)[0])


@pytest.mark.soak
def test_twenty_of_twenty(tmp_path):
    """Never a hang, never another step."""
    check_halts(*run(tmp_path, "halt", repeats=20)[0])


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_rollback_is_a_resume_in_a_fresh_process(tmp_path, processes):
    """With nothing changed, bit for bit; what the last rank alone sees takes every rank back.

    By default the learning rate is halved in every later step, on every rank.
    """
    (guarded,), errors = run(tmp_path, "guarded", processes=processes)
    (resumed, changed), _ = run(tmp_path, "resume", "changed", processes=processes)
    for one, other in zip(guarded, resumed, strict=True):
        assert not one["halted"], one["note"]
        ((alarm, target, facts),) = one["rollbacks"]
        assert (alarm, target) == (10, 4)
        assert {"weights", "optimizer steps", "learning rate", "scheduler", "global step"} <= set(facts)
        assert one["steps"] == [*range(1, 11), *range(5, 15)]
        assert other["steps"] == list(range(5, 15))
        assert {step: one["states"][step] for step in other["states"]} == other["states"]
    if processes == 2:
        assert guarded[0]["states"]["14"][1] != guarded[1]["states"]["14"][1]  # each rank has its own random state
        assert guarded[0]["states"]["14"][0] == guarded[1]["states"]["14"][0]
    assert "back at step 4 (attempt 1)" in errors
    for result in changed:
        for step, rate in result["rates"].items():
            usual = 1e-2 / (1 + int(step) / 10)
            assert rate == pytest.approx(usual * (0.5 if int(step) > 4 else 1)), step
        assert result["steps"] == [*range(1, 11), *range(5, 15)]
