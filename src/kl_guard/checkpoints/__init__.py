"""Checkpoints of a run as steps and folders; knows no framework."""

from kl_guard.checkpoints.ledger import Ledger

__all__ = ["Ledger"]
