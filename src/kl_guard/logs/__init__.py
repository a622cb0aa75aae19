"""Readers of recorded runs: a path in, rows of metrics out."""

from kl_guard.logs.tables import read_rows

__all__ = ["read_rows"]
