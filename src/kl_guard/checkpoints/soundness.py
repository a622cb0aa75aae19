"""What is wrong with a checkpoint's files, as far as can be told without its manifest."""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from kl_guard.checkpoints.manifest import Manifest, OnBytes, base_of

_CHUNK = 1 << 22
_ZIPPED = frozenset({".pt", ".pth", ".bin", ".ckpt"})  # what torch.save writes
_LENGTH = 8  # bytes at the head of a safetensors file that hold the length of its header


def problems(
    folder: Path,
    manifest: Manifest | None = None,
    sizes: Mapping[str, int] | None = None,
    *,
    on_bytes: OnBytes | None = None,
) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, a folder or one file, each with the path of the file.

    With a manifest every file is compared with it. Without one there must be files, those of `sizes` with these sizes,
    none may be empty, and those that say what is in them are asked: safetensors for its length, what torch saves for
    its checksums, JSON for being JSON. `on_bytes` is told how many bytes more were read.
    """
    try:
        base = base_of(folder)
        if manifest is not None:
            yield from manifest.problems(base, on_bytes)
            return
        for name, size in (sizes or {}).items():
            if not (base / name).is_file():
                yield f"{base / name} is missing"
            elif (base / name).stat().st_size != size:
                yield f"{base / name} has {(base / name).stat().st_size} bytes instead of {size}"
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()] if base is folder else [folder]
        if not files:
            yield f"{folder} is missing or empty"
        for file in files:
            why = _problem(file, on_bytes)
            if why:
                yield f"{file} {why}"
            if on_bytes is not None and file.suffix not in _ZIPPED:
                on_bytes(file.stat().st_size)
    except (OSError, ValueError) as error:  # a name that is too long, a network folder that has gone stale, ...
        yield f"{folder} cannot be read ({error})"


def _problem(file: Path, on_bytes: OnBytes | None) -> str:
    size = file.stat().st_size
    if size == 0:
        return "is empty"
    if file.suffix == ".safetensors":
        return _safetensors_problem(file, size)
    if file.suffix == ".json":
        try:
            json.loads(file.read_text())
        except (ValueError, RecursionError):
            return "is no JSON"
    elif file.suffix in _ZIPPED:
        return _zip_problem(file, on_bytes)
    return ""


def _safetensors_problem(file: Path, size: int) -> str:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        if length + _LENGTH > size:
            return f"is cut short: {size} bytes, and its header alone takes {length}"
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            needed = _LENGTH + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return "has no readable header"
    return "" if size == needed else f"has {size} bytes instead of {needed}"


def _zip_problem(file: Path, on_bytes: OnBytes | None) -> str:
    """Return what is wrong with a file of `torch.save`, which is a zip archive since torch 1.6."""
    with file.open("rb") as opened:
        if opened.read(2) != b"PK":
            return ""  # an older format, or somebody else's: nothing to compare with
    try:
        with zipfile.ZipFile(file) as archive:
            broken = next((name for name in archive.namelist() if not _reads(archive, name, on_bytes)), None)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError) as error:
        return f"is damaged ({error})"
    return f"is damaged (in {broken})" if broken else ""


def _reads(archive: zipfile.ZipFile, name: str, on_bytes: OnBytes | None) -> bool:
    """Return whether a member of an archive matches its checksum."""
    try:
        with archive.open(name) as member:
            while chunk := member.read(_CHUNK):
                if on_bytes is not None:
                    on_bytes(len(chunk))
    except zipfile.BadZipFile:
        return False
    return True
