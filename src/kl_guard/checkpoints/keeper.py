"""The checkpoints of a run and their pins, together: what was saved, what is kept, where one can go back to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kl_guard.checkpoints.ledger import Ledger, is_whole
from kl_guard.checkpoints.pins import Pin, PinStore
from kl_guard.checkpoints.retention import wanted
from kl_guard.findings import Checkpoint


class Keeper:
    """Takes note of checkpoints, pins the calm ones out of reach of rotation, and finds the way back.

    Parameters
    ----------
    folder:
        Where pins are kept; None for a run without files, or a process that does not write: then it only takes note.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._ledger = Ledger()
        self._pins: PinStore | None = None

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._ledger)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ledger!r})"

    def begin(self, run_id: str, known: Iterable[Checkpoint] = (), *, writes: bool = True) -> None:
        """Begin or take over a run; `known` are its checkpoints so far. Without `writes` nothing is pinned."""
        self._ledger = Ledger()
        for checkpoint in known:
            self._ledger.add(checkpoint)
        if self._folder is None or not writes:
            return
        if self._pins is None or self._pins.run_id != run_id:
            self.close()
            self._pins = PinStore(self._folder, run_id)
            self._pins.clean()

    def saved(self, checkpoint: Checkpoint, *, aligned: bool = True, suspicion: bool = False) -> None:
        """Take note of a checkpoint, pin it if it is calm, and let go of pins that are not needed any more.

        While a suspicion stands every pin is kept: how far back the trouble began is not known yet.
        """
        self._ledger.add(checkpoint)
        if self._pins is None:
            return
        if checkpoint.calm:
            self._pins.pin(checkpoint.step, Path(checkpoint.path), calm=True, aligned=aligned)
        if not suspicion:
            complete = [pin.step for pin in self._pins.pins()]  # one that is still being made replaces none that is
            self._pins.keep_only(wanted(complete, checkpoint.step))

    def go_back(self, step: int) -> None:
        """Forget checkpoints and pins of later steps: the run has gone back behind them."""
        self._ledger.forget_after(step)
        if self._pins is not None:
            self._pins.wait()
            self._pins.keep_only(pin.step for pin in self._pins.pins() if pin.step <= step)

    def newest_before(self, step: int) -> Checkpoint | None:
        """Return the newest checkpoint of an earlier step that one can go back to: its pin, or the original.

        The pin comes first, since rotation and clean-up at the end of training do not reach it. Its contents are
        compared with its manifest, as are those of an original whose pin is damaged; what differs is left out.
        """
        if self._pins is not None and any(building < step for building in self._pins.building):
            self._pins.wait()
        pins = {pin.step: pin for pin in (self._pins.pins() if self._pins is not None else []) if pin.step < step}
        originals = {checkpoint.step: checkpoint for checkpoint in self._ledger if checkpoint.step < step}
        for candidate in sorted({*pins, *originals}, reverse=True):
            pin, original = pins.get(candidate), originals.get(candidate)
            if pin is not None and self._pins is not None and self._pins.sound(pin):
                return self._as_checkpoint(pin)
            if original is not None and is_whole(original.path, pin.manifest if pin else None):
                return original
        return None

    def close(self) -> None:
        """Finish pins that were begun."""
        if self._pins is not None:
            self._pins.close()

    def _as_checkpoint(self, pin: Pin) -> Checkpoint:
        noted = next((c for c in self._ledger if c.step == pin.step), None)
        path = os.fspath(pin.path)
        return Checkpoint(pin.step, path, pin.manifest.calm) if noted is None else replace(noted, path=path)
