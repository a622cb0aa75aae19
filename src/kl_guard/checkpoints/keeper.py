"""The checkpoints of a run and their pins, together: what was saved, what is kept, where one can go back to."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kl_guard.checkpoints.ledger import Ledger
from kl_guard.checkpoints.manifest import size_of
from kl_guard.checkpoints.pins import Pin, PinStore
from kl_guard.checkpoints.quarantine import Quarantine
from kl_guard.checkpoints.retention import wanted
from kl_guard.checkpoints.soundness import problems
from kl_guard.findings import Checkpoint
from kl_guard.progress import Shown, counted, unseen

logger = logging.getLogger("kl_guard")

DETOUR = 1.5  # how many times as far one goes back for a checkpoint from which the framework resumes exactly


class Keeper:
    """Takes note of checkpoints, pins the calm ones out of reach of rotation, and finds the way back.

    Parameters
    ----------
    folder:
        The guard's folder, for `pins/` and `quarantine/`; None for a run without files.
    pins:
        Whether checkpoints are pinned.
    shown:
        Shows how far it is where the caller waits for checksums.
    """

    def __init__(self, folder: Path | None, *, pins: bool = True, shown: Shown = unseen) -> None:
        self._folder = folder
        self._pinning = pins
        self._shown = shown
        self._ledger = Ledger()
        self._pins: PinStore | None = None
        self._quarantine: Quarantine | None = None
        self._said: set[str] = set()
        self._reads = True

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._ledger)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ledger!r})"

    def begin(self, run_id: str, known: Iterable[Checkpoint] = (), *, writes: bool = True) -> None:
        """Begin or take over a run; `known` are its checkpoints so far. Without `writes` nothing is pinned or moved."""
        self._ledger = Ledger()
        for checkpoint in sorted(known, key=lambda one: one.step):
            self._note(checkpoint)
        self._reads = writes or self._folder is None  # contents are for the process that decides to compare
        if self._folder is None or not writes:
            self._pins = self._quarantine = None
            return
        self._quarantine = Quarantine(self._folder / "quarantine", within=self._folder.parent)
        if self._pinning and (self._pins is None or self._pins.run_id != run_id):
            self.close()
            self._pins = PinStore(self._folder / "pins", run_id, shown=self._shown)
            self._pins.clean()

    def get(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step, as it was noted."""
        return self._ledger.get(step)

    def saved(self, checkpoint: Checkpoint, *, suspicion: bool = False, take: bool = False) -> None:
        """Take note of a checkpoint, pin it if it is calm, and let go of pins that are not needed any more.

        While a suspicion stands every pin is kept: how far back the trouble began is not known yet. With `take` the
        folder itself becomes the pin.
        """
        self._note(checkpoint)
        if self._pins is None:
            return
        again = self._pins.forget(checkpoint.step)
        if again is not None and self._quarantine is not None:
            self._quarantine.take(again, checkpoint.attempt, name=f"pin-{checkpoint.step}")
        self.pin(checkpoint, take=take)
        if not suspicion:
            self._pins.thin_out(functools.partial(wanted, now=checkpoint.step))

    def pin(self, checkpoint: Checkpoint, *, take: bool = False) -> None:
        """Pin a checkpoint that is there and calm; one that is pinned is left as it is."""
        if self._pins is not None and checkpoint.calm and _is_there(Path(checkpoint.path)):
            self._pins.pin(
                checkpoint.step,
                Path(checkpoint.path),
                calm=True,
                aligned=checkpoint.aligned,
                attempt=checkpoint.attempt,
                take=take,
            )

    def _note(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint into the ledger; what was there before under its very name (`last.ckpt`) is not any more."""
        for older in list(self._ledger):
            if older.step != checkpoint.step and older.path == checkpoint.path:
                gone = "" if self._folder is None else os.fspath(self._folder / "pins" / f"step-{older.step}")
                self._ledger.add(replace(older, path=gone))
        self._ledger.add(checkpoint)

    def go_back(self, step: int, attempt: int = 0) -> None:
        """Forget checkpoints and pins of later steps, and move them aside: the run has gone back behind them.

        They would be found by "resume from the last checkpoint", and saving the same steps again would write into them.
        """
        later = [Path(checkpoint.path) for checkpoint in self._ledger if checkpoint.step > step and checkpoint.path]
        self._ledger.forget_after(step)
        moved = self.move_aside(reversed(later), attempt)
        if self._pins is not None and self._quarantine is not None:
            self._pins.wait()
            for later_step, path in self._pins.forget_after(step):
                moved += self._quarantine.take(path, attempt, name=f"pin-{later_step}") is not None
        if moved and self._quarantine is not None:
            logger.warning(
                "kl-guard: %s of steps after %d moved to %s",
                f"{moved} checkpoint{'s' if moved > 1 else ''} or pin{'s' if moved > 1 else ''}",
                step,
                self._quarantine.folder,
            )

    def move_aside(self, paths: Iterable[Path], attempt: int) -> int:
        """Move checkpoints aside; return how many were there."""
        if self._quarantine is None:
            return 0
        return sum(self._quarantine.take(path, attempt) is not None for path in paths)

    def provide(self, checkpoint: Checkpoint, target: Path, attempt: int) -> None:
        """See to it that `target` holds the checkpoint: "resume from the last checkpoint" is to find it there.

        What lies there and is not the same is moved aside, and the pin put in its place.
        """
        pin = self._pin_of(checkpoint.step)
        if pin is None or self._quarantine is None or self._pins is None or target == pin.path:
            return
        if target.exists():
            if self._pins.same(pin, target):
                return
            self.move_aside([target], attempt)
        try:
            self._pins.provide(pin, target)
        except OSError as error:
            logger.warning("kl-guard: the pin of step %d cannot be put back as %s: %s", pin.step, target, error)
            return
        noted = self._ledger.get(checkpoint.step)
        self._note(replace(noted or checkpoint, path=os.fspath(target)))

    def wrote(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is a pin that holds what this very process wrote, by checksums in memory."""
        pin = self._pin_of(checkpoint.step)
        return (
            pin is not None
            and self._pins is not None
            and pin.path == Path(checkpoint.path)
            and self._pins.made_here(pin)
        )

    def newest_before(
        self, step: int, now: int | None = None, good: Callable[[Checkpoint], bool] = lambda _: True
    ) -> Checkpoint | None:
        """Return the newest checkpoint of an earlier step that one can go back to: its pin, or the original.

        The pin comes first, since rotation and clean-up at the end of training do not reach it. Its contents are
        compared with its manifest, as are those of an original that was pinned once; what differs is left out. A
        checkpoint from which the framework does not resume exactly is taken where an exact one lies more than one and
        a half times as far back, seen from `now`. Those that are not `good` are left out.
        """
        if self._pins is not None and any(building < step for building in self._pins.building):
            self._pins.wait()
        candidates = self._sound_before(step, good)
        first = next(candidates, None)
        if first is None or first.aligned:
            return first
        at = step if now is None else now
        exact = next((c for c in candidates if c.aligned), None)
        return exact if exact is not None and at - exact.step <= DETOUR * (at - first.step) else first

    def wait(self) -> None:
        """Wait until the pins that were begun are complete or given up."""
        if self._pins is not None:
            self._pins.wait()

    def close(self) -> None:
        """Finish pins that were begun, and stop."""
        if self._pins is not None:
            self._pins.close()

    def disown(self) -> None:
        """In a forked child: have nothing to do with the files any more."""
        self._pins = self._quarantine = None
        self._reads = False

    def _sound_before(self, step: int, good: Callable[[Checkpoint], bool]) -> Iterator[Checkpoint]:
        """Yield the good and sound checkpoints of earlier steps, the newest first; contents are compared last."""
        pins = {pin.step: pin for pin in (self._pins.pins() if self._pins is not None else []) if pin.step < step}
        originals = {checkpoint.step: checkpoint for checkpoint in self._ledger if checkpoint.step < step}
        for candidate in sorted({*pins, *originals}, reverse=True):
            pin, original = pins.get(candidate), originals.get(candidate)
            if not good(self._as_checkpoint(pin) if pin is not None else originals[candidate]):
                continue
            if pin is not None and self._pins is not None and self._pins.sound(pin):
                yield self._as_checkpoint(pin)
            elif original is not None and self._whole(original):
                yield original

    def _whole(self, original: Checkpoint) -> bool:
        path = Path(original.path)
        if not _is_there(path):
            return False  # taken by rotation: nothing to say about it
        if not self._reads:
            return True
        manifest = self._pins.manifest_of(original.step, path) if self._pins is not None else None
        with self._shown(f"checking the checkpoint of step {original.step}") as told:
            wrong = list(problems(path, manifest, original.files, on_bytes=counted(told, size_of(path))))
        for text in wrong:
            if text not in self._said:
                self._said.add(text)
                logger.warning("kl-guard: the checkpoint of step %d is not used: %s", original.step, text)
        return not wrong

    def _pin_of(self, step: int) -> Pin | None:
        pins = self._pins.pins() if self._pins is not None else []
        return next((pin for pin in pins if pin.step == step and self._pins and self._pins.sound(pin)), None)

    def _as_checkpoint(self, pin: Pin) -> Checkpoint:
        path = os.fspath(pin.path)
        noted = self._ledger.get(pin.step)
        if noted is not None:
            return replace(noted, path=path)
        return Checkpoint(pin.step, path, pin.manifest.calm, pin.manifest.aligned, pin.manifest.attempt)


def _is_there(path: Path) -> bool:
    try:
        return path != Path() and path.exists()
    except (OSError, ValueError):  # a name that is too long, or none at all
        return False
