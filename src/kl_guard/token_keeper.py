"""What is kept of a run's tokens: a ledger in memory, and `tokens.jsonl`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_guard.lines import JsonLines
from kl_guard.observation import shown
from kl_guard.outliers import OutlierLedger
from kl_guard.thinned_tokens import worth_keeping
from kl_guard.token_stats import Excerpt, Outlier, TokenStats

NAME = "tokens.jsonl"
LONGEST = 1000  # characters of a text that are kept

TokenText = Callable[[int], str]
Warn = Callable[[str, str], None]
"""Says a text, once for each key."""


class TokenKeeper:
    """Reads the tokens of each step, gives them their text, and keeps them.

    Parameters
    ----------
    folder:
        Where the file is; None for a run without files.
    log_text:
        Whether text may be kept.
    text_of:
        Gives the text of a token id; None where it is not known.
    warn:
        Says what is wrong.

    Attributes
    ----------
    ledger:
        Which tokens have carried the KL so far.
    """

    def __init__(self, folder: Path | None, *, log_text: bool, text_of: TokenText | None, warn: Warn) -> None:
        self.ledger = OutlierLedger()
        self._marked: set[int] = set()
        shorten = functools.partial(worth_keeping, marked=self._marked)
        self._file = None if folder is None else JsonLines(folder / NAME, shorten)
        self._log_text = log_text
        self._text_of = text_of
        self._warn = warn

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ledger!r})"

    def read(self, tokens: Any) -> TokenStats | None:
        """Return a step's tokens as plain numbers; None, and a warning, for what are no tokens."""
        try:
            stats = tokens.read()
        except AttributeError:
            stats = None
        except Exception as error:
            self._warn("tokens", f"tokens cannot be read, the step counts without them: {shown(repr(error))}")
            return None
        if isinstance(stats, TokenStats):
            return stats
        self._warn("tokens", f"tokens must be what summarize_tokens returns, got {type(tokens).__name__}")
        return None

    def keep(self, step: int, attempt: int, stats: TokenStats, *, writes: bool) -> None:
        """Keep a step's tokens; on disk where this process `writes`."""
        stats = stats.with_outliers(self._described(stats.outliers))
        self.ledger.update(step, stats)
        if self._file is not None and writes:
            self._file.write({"step": step, "attempt": attempt, **stats.to_dict()})

    def begin(self, *, writes: bool) -> None:
        """Begin a fresh run: the file of an earlier one is put aside."""
        if self._file is not None and writes:
            self._file.archive()

    def mark(self, step: int) -> None:
        """Note that something was found at a step: what is near it is kept."""
        self._marked.add(step)

    def recall(self, marked: Iterable[int] = ()) -> None:
        """Take over what an earlier process has kept, and the steps that it has marked."""
        self._marked.update(marked)
        if self._file is not None:
            records = self._file.tail()
            self.ledger.recall(records if self._log_text else map(_without_text, records))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def disown(self) -> None:
        """In a forked child: have nothing to do with the file any more."""
        if self._file is not None:
            self._file.disown()
            self._file = None

    def _described(self, outliers: Iterable[Outlier]) -> list[Outlier]:
        """Return outliers with the text of their tokens, or without any text where none may be kept."""
        if not self._log_text:
            return [outlier.described(None, None) for outlier in outliers]
        return [o.described(_clean(o.prompt), _clean(o.text or self._text(o.token_id))) for o in outliers]

    def excerpts(self, step: int) -> tuple[Excerpt, ...]:
        """Return what stood around a step's outliers, with its text.

        There is none for steps before the latest, nor where no text may be kept: ids are text as well.
        """
        latest = self.ledger.latest
        if latest is None or step != self.ledger.last_step or not self._log_text:
            return ()
        return tuple(replace(e, texts=tuple(_clean(self._text(i)) for i in e.token_ids)) for e in latest.excerpts)

    def _text(self, token_id: int | None) -> str | None:
        if token_id is None or self._text_of is None:
            return None
        try:
            return str(self._text_of(token_id))
        except BaseException as error:
            if not is_fault(error):
                raise
            self._text_of = None
            self._warn("text", f"the text of tokens is not known: {shown(repr(error))}")
            return None


def _clean(text: str | None) -> str | None:
    """Return a text that any file takes: halves of characters, as tokenizers give them, are written out."""
    return None if text is None else text[:LONGEST].encode("utf-8", "backslashreplace").decode()


def is_fault(error: BaseException) -> bool:
    """Whether an exception says that something went wrong, not that somebody wants to stop."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"  # of tokenizers, in Rust


def _without_text(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of an earlier process, which may have been allowed to keep text, without it."""
    outliers = record.get("outliers")
    if not isinstance(outliers, list):
        return record
    kept = [{k: v for k, v in o.items() if k not in {"text", "prompt"}} for o in outliers if isinstance(o, dict)]
    return {**record, "outliers": kept}
