"""Shared by all tests."""

from __future__ import annotations

import signal
import sys
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
def nothing_of_earlier_tests():
    """What a test says of threads is about its own, and no run that another has left open hears of its alerts."""
    if trackio := sys.modules.get("trackio"):  # a run that was finished stays the present one of its thread
        trackio.context_vars.current_run.set(None)
    interrupted.EARLIER.update(threading.enumerate())
