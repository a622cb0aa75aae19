"""A tokenizer that raises, gives no text, or far too much of it: steps are kept, with what text there is."""

from dataclasses import replace

import pytest

from kl_guard.token_keeper import LONGEST, TokenKeeper
from kl_guard.token_stats import Excerpt
from some_tokens import stats


class PanicException(BaseException):
    """As tokenizers raise it, out of Rust."""


class Unspeakable:
    def __str__(self):
        raise ValueError("x" * 10_000)

    __repr__ = __str__


def raises(error):
    def text_of(token_id):
        raise error

    return text_of


TEXTS = {
    "raises": raises(KeyError("\x1b[2J" * 1000)),
    "panics": raises(PanicException()),
    "no text": lambda token_id: None,
    "unspeakable": lambda token_id: Unspeakable(),
    "10 MB": lambda token_id: "\u202ex" * 5_000_000,
    "half of a character": lambda token_id: "\udc00\ud800",
}
KNOWN = {"no text", "10 MB", "half of a character"}


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("kind", TEXTS)
def test_texts(tmp_path, kind, first):
    """What is written is whole, short, and read back by the next process; one line says that text is missing."""
    said, calls = [], []

    def text_of(token_id):
        calls.append(token_id)
        return "word" if len(calls) < first else TEXTS[kind](token_id)

    keeper = TokenKeeper(tmp_path, log_text=True, text_of=text_of, warn=lambda key, text: said.append((key, text)))
    one = replace(stats(), excerpts=(Excerpt(0, 0, (1, 2, 3), (0.1, None, 0.2), (None, None, None)),))
    for step in (1, 2):
        keeper.keep(step, 0, one, writes=True)
    texts = keeper.excerpts(2)[0].texts
    keeper.close()
    assert [key for key, _ in said] == ([] if kind in KNOWN else ["text"])
    assert all(text.isprintable() and len(text) < 200 for _, text in said)
    assert all(text is None or len(text.encode("utf-8", "strict")) <= 6 * LONGEST for text in texts)
    lines = (tmp_path / "tokens.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert all(len(line) < 16 * 12 * LONGEST for line in lines)
    again = TokenKeeper(tmp_path, log_text=True, text_of=None, warn=lambda *_: None)
    again.recall()
    assert again.ledger.at(2) == keeper.ledger.at(2)
    assert len(again.ledger.at(2)) == 16


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_wants_to_stop_is_not_taken_for_a_fault(error):
    keeper = TokenKeeper(None, log_text=True, text_of=raises(error()), warn=lambda *_: None)
    with pytest.raises(error):
        keeper.keep(1, 0, stats(), writes=False)
