"""What a complete copy of a checkpoint consists of: every file with its size and checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kl_guard.paths import sync

NAME = "kl_guard_manifest.json"
_CHUNK = 1 << 22

OnBytes = Callable[[int], None]
"""Is told how many bytes more were read."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's copy, and where it comes from.

    `calm` says that no suspicion stood when it was saved, `aligned` that the framework resumes from it exactly (in
    GRPO: it lies on a generation boundary), `single` that it is one file, not a folder.
    """

    run_id: str
    step: int
    calm: bool
    aligned: bool
    source: str
    files: Mapping[str, FileRecord]
    attempt: int = 0
    single: bool = False

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder` and bring it to the disk.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        data = {**vars(self), "files": {name: vars(record) for name, record in self.files.items()}}
        path = folder / NAME
        path.write_text(json.dumps(data, indent=1) + "\n")
        sync(path)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises
        ------
        ValueError
            If it is not one, names no file, or a file outside of the folder.
        OSError
            If it cannot be read.
        """
        try:
            data = json.loads((folder / NAME).read_text())
            files = {name: FileRecord(int(r["size"]), str(r["sha256"])) for name, r in data["files"].items()}
            manifest = cls(
                str(data["run_id"]),
                int(data["step"]),
                bool(data["calm"]),
                bool(data["aligned"]),
                str(data["source"]),
                files,
                int(data.get("attempt", 0)),
                bool(data.get("single", False)),
            )
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError, ValueError) as error:
            raise ValueError(f"{folder / NAME} is no manifest ({error!r})") from error
        if not files:
            raise ValueError(f"{folder / NAME} names no file: anything would match it")
        for name in files:
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or not pure.name or "\0" in name:
                raise ValueError(f"{folder / NAME} names a file outside of its folder: {name!r}")
        return manifest

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(record.size for record in self.files.values())

    def problems(self, folder: Path, on_bytes: OnBytes | None = None) -> Iterator[str]:
        """Yield what is wrong with the files in `folder`, each with its path."""
        for name, record in self.files.items():
            path = folder / name
            try:
                size = path.stat().st_size
                if size != record.size:
                    yield f"{path} has {size} bytes instead of {record.size}"
                elif checksum(path, on_bytes) != record.sha256:
                    yield f"{path} does not match its checksum"
            except FileNotFoundError:
                yield f"{path} is missing"
            except OSError as error:
                yield f"{path} cannot be read ({error})"


def base_of(checkpoint: Path) -> Path:
    """Return the folder that the names of a checkpoint's files begin in: a checkpoint is a folder, or one file."""
    return checkpoint.parent if checkpoint.is_file() else checkpoint


def files_of(folder: Path) -> list[str]:
    """Return the files below a folder, as relative names with forward slashes, without links and manifests.

    Of a checkpoint that is one file, its name.
    """
    if folder.is_file():
        return [folder.name]
    found = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return sorted(p.relative_to(folder).as_posix() for p in found if p.name != NAME)


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the size of each file of a checkpoint, by name; {} where it cannot be read."""
    try:
        return {name: (base_of(folder) / name).stat().st_size for name in files_of(folder)}
    except (OSError, ValueError):
        return {}


def size_of(checkpoint: Path) -> int:
    """Return the bytes of a checkpoint's files together; 0 where they cannot be read."""
    return sum(sizes_of(checkpoint).values())


def checksum(path: Path, on_bytes: OnBytes | None = None) -> str:
    """Return the SHA-256 of a file's content; `on_bytes` is told how many bytes more were read.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()
