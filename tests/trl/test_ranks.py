"""Two processes: what one rank alone sees stops both, at the same step; a broken guard leaves nobody behind."""

import pytest

from launch import launch


def torchrun(modes, model, folder, repeats):
    """Run `two_ranks.py` on two gloo ranks; return for each mode its results by repetition, and the other output."""
    runs = len(modes) * repeats
    results, errors = launch("two_ranks.py", ",".join(modes), model, folder, repeats, timeout=120 + 30 * runs)
    assert len(results) == 2 * runs
    by_mode = [[r for r in results if r["mode"] == mode] for mode in modes]
    return [[[r for r in mine if r["repeat"] == i] for i in range(repeats)] for mine in by_mode], errors


def check(pairs, folder):
    """Both ranks ended at the step at which the seeing one was sure, for the same reason, and rank 0 wrote it down."""
    for repeat, pair in enumerate(pairs):
        for result in pair:
            assert result["ended"] == result["expected"], pair
            assert result["halted"], pair
            assert result["reason"] == ["KL_BLOWUP", result["expected"]], pair
            assert result["output_dir"], pair
            before = [s for s in (2, 4, 6, 8) if s < result["departure"] - 1]
            assert result["way_back"] == max(before, default=None), pair
        expected = pair[0]["expected"]
        guard = folder / str(repeat) / "kl_guard"
        assert (guard / "incidents" / f"0-{expected}-KL_BLOWUP" / "incident.json").is_file()
        assert (guard / "halted" / f"step-{expected}").is_dir() == (repeat % 2 == 0)
        kept = sorted(p.name for p in (folder / str(repeat)).glob("checkpoint-*"))
        assert f"checkpoint-{expected}" not in kept


def test_one_rank_sees_the_trouble(fitted, tmp_path):
    """Both stop at the same step, three times of three (twenty under `make soak`).

    Where one has a broken guard its training goes on, and a later halt of the other rank still stops both.
    """
    (sees, fault), errors = torchrun(["sees", "fault"], fitted, tmp_path, 3)
    check(sees, tmp_path / "sees")
    check(fault, tmp_path / "fault")
    assert "a fault of the guard itself" in errors


@pytest.mark.soak
def test_one_rank_sees_the_trouble_twenty_times(fitted, tmp_path):
    """Twenty of twenty."""
    (pairs,), _ = torchrun(["sees"], fitted, tmp_path, 20)
    check(pairs, tmp_path / "sees")
    assert {pair[0]["seer"] for pair in pairs} == {0, 1}


@pytest.mark.soak
def test_a_broken_guard_on_one_rank_ten_times(fitted, tmp_path):
    """Ten of ten."""
    (pairs,), _ = torchrun(["fault"], fitted, tmp_path, 10)
    check(pairs, tmp_path / "fault")
