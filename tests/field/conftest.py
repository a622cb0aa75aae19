"""What frameworks warn of is theirs."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items):
    """As in the tests of the adapters."""
    for item in items:
        if item.path.parent.name == "field":
            item.add_marker(pytest.mark.filterwarnings("default"))
