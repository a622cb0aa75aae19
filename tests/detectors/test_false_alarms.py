"""A small part of the study of benchmarks/false_alarms.py: no healthy run is halted, every blow-up is."""

import statistics

import numpy as np
import pytest
from false_alarms import Task, rows, tasks, watch
from simulated_runs import BLOW_UPS, HEALTHY, LATE, RECORDED

LENGTHS = (200, 800)


@pytest.mark.parametrize("family", HEALTHY)
def test_no_healthy_run_is_halted(family):
    """Noise as recorded series have it."""
    for number in range(12):
        outcome = watch(Task("healthy", family, LENGTHS, RECORDED, (11, number)))
        assert outcome.fired is None, outcome


@pytest.mark.parametrize("family", [name for name in BLOW_UPS if name != LATE])
def test_every_blow_up_is_halted_soon(family):
    """Not before its cause, and at the median soon after the curve without noise has crossed the threshold."""
    outcomes = [watch(Task("blow-up", family, LENGTHS, RECORDED, (12, number))) for number in range(10)]
    assert all(outcome.fired is not None and outcome.fired > outcome.run.cause for outcome in outcomes)
    assert statistics.median(outcome.fired - outcome.run.crossing for outcome in outcomes) <= 20


def test_a_task_gives_the_same_run_again():
    """The seed alone decides."""
    for task in tasks(5, 8, 2, seed=3):
        if task.lengths[1] <= 5_000:
            assert task.simulate() == task.simulate()


def test_noise_is_as_it_is_said_to_be():
    """Deviation of log KL and correlation of a settled run lie in the ranges of recorded series, or near."""
    task = Task("healthy", "settles at 0.1 to 0.8", (5_000, 5_000), RECORDED, (13,))
    logs = np.log(task.simulate().values[500:])
    assert 0.15 < logs.std() < 0.9
    assert -0.05 < np.corrcoef(logs[1:], logs[:-1])[0, 1] < 0.9


def test_the_tables_count_what_was_watched():
    """One row a family and one for all."""
    outcomes = [watch(task) for task in tasks(5, 4, 0, seed=1) if task.lengths[0] < 5_000]
    good, bad = rows(outcomes)
    assert [line[2] for line in good if line[0] == "healthy"] == ["1"] * 5 + ["5"]
    assert [line[2] for line in bad if line[1] == "all" and line[0] == "blow-up"] == ["3 of 3"]
