"""Logs and tokenizers that nobody should have, in real runs: the trainer trains on, and one line says what is lost."""

import logging

import pytest
from transformers import TrainerCallback

from hostile import NAMES, NUMBERS, REFUSED
from kl_guard_trl import KLGuardCallback
from trl_runs import SetKL

pytestmark = pytest.mark.newest  # the guard's own parts are the same on every version

STEPS = 8
SETTINGS = {
    "max_steps": STEPS,
    "max_completion_length": 2,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-4,
}


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "kl_guard" and r.levelno >= logging.WARNING]


class Hostile(TrainerCallback):
    """Puts into each log what no trainer logs."""

    def __init__(self):
        self.values = [*REFUSED.values(), *(value for value, _ in NUMBERS.values())]

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            some = self.values[(state.global_step - 1) * 6 :][:6]
            logs |= dict.fromkeys(NAMES, some[0])
            logs |= dict(zip(("kl", "reward", "grad_norm", "entropy", "learning_rate", "loss"), some, strict=False))


@pytest.mark.parametrize("attached", [False, True])
def test_hostile_logs(make_trainer, caplog, attached):
    """All steps are trained and observed, and each name is complained of once."""
    guard = KLGuardCallback(action="warn")
    trainer = make_trainer([Hostile(), guard], **SETTINGS)
    if attached:
        guard.attach(trainer)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert list(guard.guard.history.steps) == list(range(1, STEPS + 1))
    assert not guard.guard.blind
    lost = [text for text in said(caplog) if "counts as missing" in text]
    assert 0 < len(lost) == len({text.partition(" must be")[0] for text in lost}) <= 6
    assert all(len(text) < 300 and text.isprintable() for text in lost)


class Tokenizer:
    """The trainer's own tokenizer, of which some methods are wrong, from the `first` call on."""

    def __init__(self, real, first, wrong):
        self._real, self._first, self._wrong = real, first, wrong
        self.calls = 0

    def __getattr__(self, name):
        given = getattr(self._real, name)
        return self._spoilt(given) if name in {"decode", "batch_decode", "convert_ids_to_tokens"} else given

    def _spoilt(self, method):
        def call(ids, *args, **kwargs):
            self.calls += 1
            given = method(ids, *args, **kwargs)
            return given if self.calls < self._first else self._wrong(given)

        return call


class PanicException(BaseException):
    """As tokenizers raise it, out of Rust."""


def raises(error):
    def wrong(given):
        raise error

    return wrong


def each(text):
    """Give this in the place of each text."""
    return lambda given: [text] * len(given) if isinstance(given, list) else text


WRONG = {
    "raises": raises(KeyError(7)),
    "panics": raises(PanicException("index out of bounds")),
    "no text": each(None),
    "bytes": each(b"\xff\xfe"),
    "numbers": each(7.5),
    "10 MB": each("x" * 10_000_000),
    "half of a character": each("\ud83d"),
    "commands": each("\x1b[2J</script><script>\u202e\x00\n"),
    "too few": lambda given: given[:1],
}


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_hostile_tokenizer(make_trainer, tmp_path, monkeypatch, caplog, wrong, first):
    """The guard halts as with any other, its files are small and read back, and the trainer never hears of it."""
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step > 4 else None), guard], **SETTINGS)
    guard.attach(trainer)
    tokenizer = Tokenizer(trainer.processing_class, first, WRONG[wrong])
    monkeypatch.setattr("kl_guard_trl.internals.tokenizer", lambda _: tokenizer)
    monkeypatch.setattr("kl_guard_trl.capture.TELLING", 0.0)  # so that prompts are shown with these tokens, too
    trainer.train()
    assert tokenizer.calls >= first
    assert guard.halted
    assert guard.decision.reason.step == 7
    assert list(guard.guard.history.steps) == list(range(1, 8))
    assert not guard.guard.blind
    assert "a fault of the guard" not in caplog.text
    complaints = [text for text in said(caplog) if "is not known" in text]
    assert len(complaints) == (2 if wrong in {"raises", "panics"} else 0)
    for path in (tmp_path / "run" / "kl_guard").rglob("*"):
        if path.is_file() and path.suffix in {".jsonl", ".json", ".html"}:
            assert path.stat().st_size < 1_000_000
            text = path.read_text(encoding="utf-8")
            assert "\x1b" not in text
            assert "<script>" not in text or path.suffix != ".html"
    assert len(guard.guard.outliers) == 7
