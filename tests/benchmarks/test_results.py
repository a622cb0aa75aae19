"""What `make bench` writes, and the recorded runs that ship with the project."""

from __future__ import annotations

import csv

import detection
import pytest
import results


@pytest.fixture(scope="module")
def series():
    return detection.read_series(detection.OWN)


def test_every_recorded_blow_up_is_caught_in_time_and_no_healthy_run_halted(series):
    """Real runs, labelled by what was done to them."""
    found = detection.judge(detection.Tool("kl-guard", detection.kl_guard()), series)
    assert found.details == []
    assert (found.caught, found.false_halts) == (found.bad, 0)
    assert found.bad >= 5
    assert found.good >= 5
    assert found.broken_caught == found.broken > 0


def test_a_tool_that_always_halts_and_one_that_never_does(series):
    """The table tells them apart."""
    always = detection.judge(detection.Tool("always", lambda rows: (1, None)), series)
    never = detection.judge(detection.Tool("never", lambda rows: (None, None)), series)
    assert always.false_halts == always.good == never.good
    assert never.false_halts == never.caught == 0
    assert len(never.row()) == len(detection.HEADER)
    assert never.good_steps == sum(len(one.rows) for one in series if one.critical == "no")


def test_labels_and_series_belong_together(series):
    """Each label has its series, of the length it says."""
    with (detection.OWN / "labels.csv").open(newline="") as file:
        labels = {label["id"]: label for label in csv.DictReader(file)}
    assert {path.stem for path in (detection.OWN / "series").glob("*.csv")} == set(labels)
    assert all(len(one.rows) == int(labels[one.id]["n"]) for one in series)


def test_sections_that_are_not_run_stay(tmp_path):
    """What `--only` leaves out is kept as it was."""
    texts = {section.title: f"text of {section.name}\n\n### more" for section in results.SECTIONS}
    page = results.page(texts)
    assert results.sections_of(page) == texts
    assert results.page(results.sections_of(page)) == page
