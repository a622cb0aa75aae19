"""Two processes: what one rank alone sees stops both, at the same step; a broken guard leaves nobody behind."""

import pytest

from launch import launch


def torchrun(mode, model, folder, repeats):
    """Run `two_ranks.py` on two gloo ranks; return its results by repetition."""
    results, errors = launch("two_ranks.py", mode, model, folder, repeats, timeout=120 + 30 * repeats)
    assert len(results) == 2 * repeats
    return [[r for r in results if r["repeat"] == i] for i in range(repeats)], errors


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
    """Both stop at the same step, three times of three (twenty under `make soak`)."""
    pairs, _ = torchrun("sees", fitted, tmp_path, 3)
    check(pairs, tmp_path)


@pytest.mark.newest
def test_a_broken_guard_on_one_rank(fitted, tmp_path):
    """Its training goes on, and a later halt of the other rank still stops both."""
    pairs, errors = torchrun("fault", fitted, tmp_path, 2)
    check(pairs, tmp_path)
    assert "a fault of the guard itself" in errors


@pytest.mark.soak
def test_one_rank_sees_the_trouble_twenty_times(fitted, tmp_path):
    """Twenty of twenty."""
    pairs, _ = torchrun("sees", fitted, tmp_path, 20)
    check(pairs, tmp_path)
    assert {pair[0]["seer"] for pair in pairs} == {0, 1}


@pytest.mark.soak
def test_a_broken_guard_on_one_rank_ten_times(fitted, tmp_path):
    """Ten of ten."""
    pairs, _ = torchrun("fault", fitted, tmp_path, 10)
    check(pairs, tmp_path)
