"""Shared by all tests."""

from __future__ import annotations

import signal
import threading

import hypothesis
import pytest

import interrupted

hypothesis.settings.register_profile("kl-guard", deadline=None, max_examples=60)
hypothesis.settings.load_profile("kl-guard")

# What a shell starts in the background ignores Ctrl-C, and so does all that this starts: tests of it would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def threads_of_earlier_tests():
    """What a test says of threads is about its own: a tracker that was closed may take its alert a while later."""
    interrupted.EARLIER.update(threading.enumerate())
