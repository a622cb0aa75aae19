"""Checkpoints of a run as steps and folders, and their pins; knows no framework."""

from kl_guard.checkpoints.keeper import Keeper
from kl_guard.checkpoints.ledger import Ledger
from kl_guard.checkpoints.manifest import FileRecord, Manifest, sizes_of
from kl_guard.checkpoints.pins import Pin, PinStore
from kl_guard.checkpoints.quarantine import Quarantine
from kl_guard.checkpoints.retention import wanted

__all__ = ["FileRecord", "Keeper", "Ledger", "Manifest", "Pin", "PinStore", "Quarantine", "sizes_of", "wanted"]
