"""Pins: copies of checkpoints that the trainer's rotation cannot reach."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from kl_guard.checkpoints.manifest import NAME as MANIFEST
from kl_guard.checkpoints.manifest import FileRecord, Manifest, base_of, checksum, files_of
from kl_guard.paths import safe_name, sync, unused
from kl_guard.progress import Shown, counted, unseen

logger = logging.getLogger("kl_guard")

SMALL = 1 << 20  # bytes; smaller files are copied, since trainers rewrite them in place
DRAFT = ".draft-"
KNOWN = "manifests"  # of pins that are gone, as long as the original is there
PROCESS = uuid.uuid4().hex[:8]  # told apart from earlier processes, whose number may have been the same
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES})
LOOK = 0.1  # seconds from one look at a pin that is waited for to the next
ROOM = 2  # checkpoints' worth of free space below which nothing is copied


@dataclass(frozen=True)
class Pin:
    """A complete pin: its folder and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return self.manifest.step


class PinStore:
    """Keeps pins in `<folder>/step-N`, for one run.

    `pin` takes hold of a checkpoint's files at once: large ones by hard links, which need neither time nor space; where
    links cannot be made, by open files, so that rotation may delete the originals. The rest is done on a background
    thread: copies, checksums, bringing it to the disk, the manifest. Only then the pin appears under its name, by one
    rename. Whatever goes wrong is logged once per kind; the trainer never notices.

    Parameters
    ----------
    folder:
        Where the pins are.
    run_id:
        The run they belong to; pins of another run are never offered.
    small:
        Files of fewer bytes are copied, not linked.
    shown:
        Shows how far it is where the caller waits for checksums.
    """

    def __init__(self, folder: Path, run_id: str, *, small: int | None = None, shown: Shown = unseen) -> None:
        self.folder = folder
        self.run_id = run_id
        self._small = SMALL if small is None else small
        self._compared: dict[Path, object] = {}  # pins found sound, with the state of their files then
        self._worker: ThreadPoolExecutor | None = None
        self._building: dict[int, Future[None]] = {}
        self._made: dict[int, Manifest] = {}  # by this process; what is on the disk, others may have written
        self._shares: dict[int, float] = {}  # of the pins that are being made, as far as they are
        self._shown = shown
        self._said: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, run_id={self.run_id!r})"

    def clean(self) -> None:
        """Remove what an interrupted process left half-built; put complete pins of other runs aside."""
        for draft in self.folder.glob(f"{DRAFT}*"):
            if not draft.name.endswith(PROCESS):
                shutil.rmtree(draft, ignore_errors=True)
        for path in self.folder.glob("step-*"):
            try:
                owner = Manifest.read(path).run_id
            except (OSError, ValueError):
                owner = "unknown"
            if owner != self.run_id:
                self._put_aside(path, owner)

    def pin(
        self, step: int, source: Path, *, calm: bool, aligned: bool = True, attempt: int = 0, take: bool = False
    ) -> bool:
        """Begin to pin the checkpoint in `source`, a folder or one file; return whether it is being done.

        Costs the caller a link, or the opening of a file, per file. A step that is pinned already is left as it is, and
        so is one that another guard of this process is pinning. With `take` the folder itself becomes the pin: it was
        made for that.
        """
        draft = self.folder / f"{DRAFT}{step}-{PROCESS}"
        if step in self.building or draft.exists() or (self.folder / f"step-{step}").exists():
            return False
        held: dict[str, BinaryIO] = {}
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="kl-guard-pins")
        try:
            names = files_of(source)
            if not names:
                raise FileNotFoundError(f"{source} holds no files")
            single = source.is_file()
            manifest = Manifest(self.run_id, step, calm, aligned, str(source), {}, attempt, single)
            draft.mkdir(parents=True)
            if take and not single:
                source.rename(draft)  # takes the place of an empty folder
            else:
                base = base_of(source)
                for name in names:
                    self._hold(base / name, draft / name, name, held)
                self._check_room(base, names, held)
            self._building[step] = self._worker.submit(self._finish, draft, names, held, manifest)
        except OSError as error:
            self._give_up(draft, held, f"checkpoint {source} is not pinned: {error}", str(error.errno))
            return False
        except BaseException:
            _leave_none_of(draft, held)  # or this process would take it for one that is being made, for good
            raise
        return True

    @property
    def building(self) -> set[int]:
        """Steps of the pins that were begun and are not complete yet."""
        return {step for step, future in self._building.items() if not future.done()}

    def wait(self) -> None:
        """Wait until every pin begun is complete or given up."""
        for step, future in list(self._building.items()):
            with self._shown(f"pinning the checkpoint of step {step}") as told:
                while not futures.wait([future], timeout=LOOK).done:
                    told(self._shares.get(step, 0.0))
            future.result()
            self._building.pop(step, None)

    def pins(self) -> list[Pin]:
        """Return the complete pins of this run, by step; contents are not compared."""
        found = []
        for path in self.folder.glob("step-*"):
            try:
                if path.is_symlink():
                    raise ValueError("it is a link, and pins are folders")
                manifest = Manifest.read(path)
            except (OSError, ValueError) as error:
                self._say(str(path), f"pin {path} is not used: {error}")
                continue
            if manifest.run_id == self.run_id and path.name == f"step-{manifest.step}":
                found.append(Pin(path, manifest))
        return sorted(found, key=lambda pin: pin.step)

    def sound(self, pin: Pin) -> bool:
        """Compare a pin with its manifest, contents included; what differs is logged, naming the file."""
        now = _states(pin.path)
        if now is not None and self._compared.get(pin.path) == now:
            return True  # a large checkpoint is read once, not at every look
        with self._shown(f"checking the pin of step {pin.step}") as told:
            wrong = list(_links(pin)) or list(pin.manifest.problems(pin.path, counted(told, pin.manifest.size)))
        for text in wrong:
            self._say(text, f"pin of step {pin.step} is not used: {text}")
        if not wrong:
            self._compared[pin.path] = now
        return not wrong

    def made_here(self, pin: Pin) -> bool:
        """Return whether a sound pin holds what this very process wrote into it, by checksums held in memory.

        The manifest on the disk tells damage, not intent: who may write a pin may write its manifest too.
        """
        return self._made.get(pin.step) == pin.manifest and self.sound(pin)

    def same(self, pin: Pin, folder: Path) -> bool:
        """Return whether a folder holds what a sound pin holds; files that are linked are not read again."""
        if pin.manifest.single:
            return folder.is_file() and all(checksum(folder) == record.sha256 for record in pin.manifest.files.values())
        try:
            linked = [n for n in pin.manifest.files if (folder / n).exists() and (folder / n).samefile(pin.path / n)]
        except OSError:
            return False
        rest = {name: record for name, record in pin.manifest.files.items() if name not in linked}
        unlinked = replace(pin.manifest, files=rest)
        with self._shown(f"comparing {folder.name} with its pin") as told:
            return not any(unlinked.problems(folder, counted(told, unlinked.size)))

    def thin_out(self, wanted: Callable[[list[int]], set[int]]) -> None:
        """Delete the complete pins of this run that are not wanted: only the guard's own surplus.

        Their manifests stay, as long as the originals do, to tell whether one of those is sound. `wanted` is given the
        steps of the pins; it is asked once, and only what it was asked about may go: a pin that is being named just now
        may be missing from one look at the folder, and others with it.
        """
        complete = self.pins()  # one that is still being made replaces none that is
        keep = wanted([pin.step for pin in complete])
        for pin in complete:
            if pin.step not in keep:
                doomed = pin.path.with_name(f"{DRAFT}{pin.step}-surplus-{PROCESS}")
                try:
                    pin.path.rename(doomed)
                    self._keep_manifest(doomed, pin.manifest)
                except OSError as error:
                    self._say("surplus", f"surplus pin {pin.path} cannot be removed: {error}")
                    continue
                shutil.rmtree(doomed, ignore_errors=True)

    def manifest_of(self, step: int, source: Path) -> Manifest | None:
        """Return the manifest of a checkpoint in `source` that was pinned once; None where it never was."""
        for folder in (self.folder / f"step-{step}", self.folder / KNOWN / f"step-{step}"):
            try:
                manifest = Manifest.read(folder)
            except (OSError, ValueError):
                continue
            if manifest.run_id == self.run_id and Path(manifest.source).name == source.name:
                return manifest
        return None

    def provide(self, pin: Pin, target: Path) -> None:
        """Make a checkpoint again out of a pin, in `target`, by one rename: links where possible, copies elsewhere.

        Raises
        ------
        OSError
            If that cannot be done; nothing is left in `target` then.
        """
        draft = self.folder / f"{DRAFT}{target.name}-{PROCESS}"  # here, where a killed one is cleaned up
        try:
            for name in pin.manifest.files:
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                if pin.manifest.files[name].size >= self._small:
                    try:
                        os.link(pin.path / name, draft / name)
                        continue
                    except OSError as error:
                        if error.errno not in NO_LINKS:
                            raise
                shutil.copyfile(pin.path / name, draft / name)
                sync(draft / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            (draft / next(iter(pin.manifest.files)) if pin.manifest.single else draft).rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def forget_after(self, step: int) -> list[tuple[int, Path]]:
        """Drop what is known of later steps; return step and folder of their pins, for the caller to move away."""
        for later, known in _by_step(self.folder / KNOWN):
            if later > step:
                _drop(known)
        return [(later, path) for later, path in _by_step(self.folder) if later > step]

    def forget(self, step: int) -> Path | None:
        """Drop what is known of one step, which is being saved again; return its pin, for the caller to move away."""
        if step in self._building:
            self.wait()
        self._made.pop(step, None)
        _drop(self.folder / KNOWN / f"step-{step}")
        path = self.folder / f"step-{step}"
        return path if path.exists() else None

    def _keep_manifest(self, doomed: Path, manifest: Manifest) -> None:
        folder = self.folder / KNOWN
        for known in folder.glob("step-*"):
            try:
                gone = not self._original(Manifest.read(known)).exists()
            except (OSError, ValueError):
                gone = True
            if gone:
                _drop(known)
        if self._original(manifest).exists():
            keep = folder / f"step-{manifest.step}"
            keep.mkdir(parents=True, exist_ok=True)
            (doomed / MANIFEST).replace(keep / MANIFEST)

    def _original(self, manifest: Manifest) -> Path:
        """Return where the original of a pin is, also when the output folder was moved since."""
        moved = self.folder.parent.parent / Path(manifest.source).name
        return moved if moved.exists() else Path(manifest.source)

    def _put_aside(self, path: Path, owner: str) -> None:
        """Move a pin that is not of this run to `<folder>/of-<run id>/`: it is not ours to delete."""
        target = self.folder / f"of-{safe_name(owner)}" / path.name
        try:
            target.parent.mkdir(exist_ok=True)
            path.rename(unused(target))
        except OSError as error:
            self._say("aside", f"{path}, a pin of another run, cannot be put aside: {error}")

    def close(self) -> None:
        """Finish what was begun, and stop the thread."""
        if self._worker is not None:
            self.wait()
            self._worker.shutdown(wait=True)
            self._worker = None

    def _hold(self, source: Path, target: Path, name: str, held: dict[str, BinaryIO]) -> None:
        """Make sure of one file before rotation can take it."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.stat().st_size >= self._small:
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
            else:
                return
        held[name] = source.open("rb", buffering=0)

    def _check_room(self, source: Path, names: list[str], held: dict[str, BinaryIO]) -> None:
        """Refuse to copy where the trainer's own saves would run out of space."""
        large = [f for f in held.values() if os.fstat(f.fileno()).st_size >= self._small]
        if large:
            size = sum((source / name).stat().st_size for name in names)
            free = shutil.disk_usage(self.folder).free
            if free < ROOM * size:
                raise OSError(f"it would have to be copied ({size / 1e6:.0f} MB), and {free / 1e6:.0f} MB are free")

    def _finish(self, draft: Path, names: list[str], held: dict[str, BinaryIO], manifest: Manifest) -> None:
        """On the background thread: copy what is held open, take checksums, bring all to the disk, name the pin."""
        try:
            for name, file in held.items():
                with file, (draft / name).open("xb") as copy:
                    shutil.copyfileobj(file, copy, 1 << 22)
            files = {}
            sizes = {name: (draft / name).stat().st_size for name in names}
            on_bytes = counted(functools.partial(self._shares.__setitem__, manifest.step), sum(sizes.values()))
            for name, size in sizes.items():
                sync(draft / name)
                files[name] = FileRecord(size, checksum(draft / name, on_bytes))
            complete = Manifest(**{**vars(manifest), "files": files})
            complete.write(draft)
            for folder in [p for p in draft.rglob("*") if p.is_dir()] + [draft]:
                sync(folder)
            draft.rename(self.folder / f"step-{manifest.step}")
            self._made[manifest.step] = complete
            sync(self.folder)
        except OSError as error:
            self._give_up(draft, held, f"checkpoint {manifest.source} is not pinned: {error}", str(error.errno))
        except Exception:
            logger.exception("kl-guard: a fault of the guard itself in pinning; training goes on")
            self._give_up(draft, held, f"checkpoint {manifest.source} is not pinned", "fault")
        finally:
            self._shares.pop(manifest.step, None)

    def _give_up(self, draft: Path, held: dict[str, BinaryIO], text: str, kind: str) -> None:
        _leave_none_of(draft, held)
        self._say(kind, text)

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("kl-guard: %s", text)


def _leave_none_of(draft: Path, held: dict[str, BinaryIO]) -> None:
    for file in held.values():
        file.close()
    shutil.rmtree(draft, ignore_errors=True)


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    """Return the folders `step-N` in a folder, by step."""
    numbered = [(path.name.removeprefix("step-"), path) for path in folder.glob("step-*")]
    return sorted((int(number), path) for number, path in numbered if number.isdecimal())


def _drop(known: Path) -> None:
    """Remove a manifest that was kept, and its folder; nothing else, wherever a link may lead."""
    with contextlib.suppress(OSError):
        if not (known.is_symlink() or known.parent.is_symlink()):
            (known / MANIFEST).unlink(missing_ok=True)
            known.rmdir()


def _links(pin: Pin) -> Iterator[str]:
    """Yield the files of a pin that are really elsewhere: pins hold no links, and what one leads to is not ours."""
    root = os.path.realpath(pin.path)
    for name in pin.manifest.files:
        path = pin.path / name
        if os.path.realpath(path) != os.fspath(Path(root, name)):
            yield f"{path} is a link"


def _states(folder: Path) -> object:
    """Return what changes when a file below a folder is written to; None where it cannot be told."""
    try:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [
            (path, (stat := path.stat()).st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path in files
        ]
    except OSError:
        return None
