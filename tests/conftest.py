"""Shared by all tests."""

from __future__ import annotations

import signal

import hypothesis

hypothesis.settings.register_profile("kl-guard", deadline=None, max_examples=60)
hypothesis.settings.load_profile("kl-guard")

# What a shell starts in the background ignores Ctrl-C, and so does all that this starts: tests of it would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
