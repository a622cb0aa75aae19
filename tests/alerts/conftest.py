"""A service that takes alerts."""

import pytest

from alert_receiver import receiver


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    monkeypatch.delenv("KL_GUARD_ALERTS", raising=False)


@pytest.fixture
def service():
    with receiver() as it:
        yield it
