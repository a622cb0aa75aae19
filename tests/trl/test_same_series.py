"""A series in a real run says what its replay says."""

from __future__ import annotations

import pytest

from kl_guard import replay
from kl_guard_trl import KLGuardCallback
from trl_runs import SetKL

pytestmark = [pytest.mark.trl, pytest.mark.newest]

SERIES = [0.01 + 0.002 * (i % 3) for i in range(30)] + [0.02 * 1.5**i for i in range(12)]


@pytest.mark.parametrize("attached", [True, False])
def test_a_run_says_what_a_replay_of_its_series_says(make_trainer, attached):
    """The same findings at the same steps, observed by step or by log."""
    guard = KLGuardCallback(action="warn")
    series = SetKL(lambda step: SERIES[step - 1])
    trainer = make_trainer([series] if attached else [series, guard], max_steps=len(SERIES))
    if attached:
        series.patch(trainer)
        guard.attach(trainer)
    trainer.train()
    expected = replay(SERIES, action="warn").findings
    assert {"KL_GROWTH", "KL_BLOWUP"} <= {f.signature for f in expected}
    found = [f for f in guard.guard.findings if f.signature in {e.signature for e in expected}]
    assert [(f.signature, f.step, f.onset_step, f.departure_step) for f in found] == [
        (f.signature, f.step, f.onset_step, f.departure_step) for f in expected
    ]
