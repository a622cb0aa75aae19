"""The incident report: one HTML file that says what happened, opened from disk."""

from kl_guard.report.page import render
from kl_guard.report.story import Story, story_of

__all__ = ["Story", "render", "story_of"]
