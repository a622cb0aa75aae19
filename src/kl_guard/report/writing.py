"""Writing a report: the old one stays until the new one is whole, and nothing that it tells of is overwritten."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE = b"<!doctype html"


def write_page(path: Path, page: str) -> Path:
    """Write a page beside `path` and put it there by one rename; a device or a pipe is written to as it is.

    Raises
    ------
    OSError
        If it cannot be written; it names `path`.
    """
    data = page.encode("utf-8", "backslashreplace")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return path
        target = path.resolve()  # a link stays one
        draft = target.with_name(f".{target.name[:200]}.{os.getpid()}.tmp")
        try:
            draft.write_bytes(data)
            draft.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def refuse_to_overwrite(path: Path, read: Iterable[Path]) -> None:
    """Raise where a report would take the place of what is read for it, or of anything else but a page.

    Raises
    ------
    ValueError
        When `path` is one of the files, through links too, or a file that is no HTML.
    """
    for file in read:
        with contextlib.suppress(OSError):
            if path.samefile(file):
                raise ValueError(f"{path} is {file}, which is read here: the report would overwrite it")
    if path.is_file():
        with path.open("rb") as there:
            beginning = there.read(len(_PAGE)).lower()
        if beginning not in (b"", _PAGE):
            raise ValueError(f"{path} is there and no report: it would be overwritten")
