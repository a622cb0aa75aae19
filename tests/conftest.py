"""Shared by all tests."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("kl-guard", deadline=None, max_examples=60)
hypothesis.settings.load_profile("kl-guard")
