"""What Lightning warns of in tiny runs is its own: few batches, no workers, no logger, folders used again."""

from __future__ import annotations

import pytest
import torch

ITS_OWN = [
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*resuming from a checkpoint that ended before the epoch ended.*",
    "ignore:.*no pre-optimization state was saved.*",
    "ignore:.*LeafSpec.*:DeprecationWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:.*is only supported on Linux.*",
    "ignore:.*there is no last checkpoint available.*",
    "ignore:.*'set_vital' is deprecated.*",
    "ignore:.*was called without a model.*",
    "ignore:.*callbacks used to create the checkpoint need to be provided.*",
    "ignore:.*GPU available but not used.*",
    "ignore:.*does not have a `val_dataloader`.*",
]


def pytest_collection_modifyitems(items):
    """Leave those out."""
    for item in items:
        if item.path.parent.name == "lightning":
            for text in ITS_OWN:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
