"""Names and values that no trainer should log: each is read, or left out with one line, and never disturbs a run."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostile import NAMES, NUMBERS, REFUSED, Lies
from kl_guard import GuardConfig, KLGuard
from kl_guard.cli import main
from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard.observation import SCALARS
from kl_guard.report import render, story_of
from streams import blow_up


def guard_of(folder, **knobs):
    return KLGuard(GuardConfig(**knobs), output_dir=folder)


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", NUMBERS)
def test_what_is_a_number(tmp_path, caplog, kind):
    """It is that number, in memory and after a resume, to the bit."""
    value, number = NUMBERS[kind]
    guard = guard_of(tmp_path)
    guard.observe(1, value, loss=0.5, grad_norm=value)
    guard.close()
    for history in (guard.history, recall(read_journal(tmp_path / "kl_guard" / "journal.jsonl")[0]).history):
        (one,) = history
        assert type(one.kl_mean) is (float if number is not None else type(None))
        assert repr(one.kl_mean) == repr(one.grad_norm) == repr(number)
        assert one.loss == 0.5
    assert not guard.blind
    assert "missing" not in caplog.text


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_none(tmp_path, caplog, kind):
    """It counts as missing, said once and in a short line; the rest of the step is taken."""
    guard = guard_of(tmp_path)
    for step in (1, 2):
        guard.observe(step, REFUSED[kind], kl_max=0.5, loss=0.5)
    guard.close()
    assert [(one.kl_mean, one.kl_max, one.loss) for one in guard.history] == [(None, 0.5, 0.5)] * 2
    assert not guard.blind
    (line,) = said(caplog)
    assert line.startswith("kl-guard: a value counts as missing: kl_mean must be a number")
    assert len(line) < 300
    assert line.isprintable()


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("where", ["step", "window"])
def test_steps_and_windows_that_are_none(caplog, where, kind):
    """A step that cannot be read costs the observation, a window its width."""
    guard = KLGuard()
    value = REFUSED[kind]
    assert not guard.observe(value if where == "step" else 1, 0.1, window=value if where == "window" else 1)
    assert len(guard.history) == (where == "window")
    assert not guard.blind
    (line,) = said(caplog)
    assert f"{where} must be a" in line
    assert len(line) < 300
    assert line.isprintable()


def test_a_float_that_lies(tmp_path, caplog):
    """Its own number counts, not what its methods say."""
    guard = guard_of(tmp_path)
    for step in range(1, 60):
        guard.observe(step, Lies(0.02), kl_max=Lies(0.5), reward=Lies(1.0))
    guard.close()
    assert list(guard.history.column("kl_mean")) == [0.02] * 59
    assert {type(one.kl_max) for one in guard.history} == {float}
    assert not guard.findings
    assert not said(caplog)


def test_names_that_no_trainer_has(tmp_path, caplog, capsys):
    """They are in no line, no file and no report as they are, and what else is logged is read."""
    guard = guard_of(tmp_path, action="halt")
    step = 0
    for step, kl in enumerate(blow_up(), start=1):
        metrics = {**dict.fromkeys(NAMES, 7.0), "kl": kl, "reward": 1.0, "loss": 0.1}
        if guard.log(metrics, step=step):
            break
    guard.close()
    assert guard.decision.action == "halt"
    assert guard.source.name == "kl"
    assert not guard.blind
    assert set(guard.history.column("kl_mean")) == set(blow_up()[:step])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for text in (*said(caplog), *(path.read_text(encoding="utf-8") for path in files)):
        assert "<script>alert" not in text
        assert "\x1b" not in text
        assert "klklkl" not in text


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(n, str) and n])
def test_a_hostile_name_that_the_user_asks_for(tmp_path, caplog, name):
    """It is watched; a line shows it as plain text, and not all of 10 kB."""
    guard = guard_of(tmp_path)
    for step, kl in enumerate(blow_up(), start=1):
        if guard.log({name: kl, "loss": 0.1}, step=step, key=name):
            break
    guard.close()
    assert guard.decision.action == "halt"
    assert guard.source.name == name
    for line in said(caplog):
        assert all(c.isprintable() or c == "\n" for c in line)
        assert len(line) < 2000
    render(story_of(tmp_path / "kl_guard")).encode("utf-8", "strict")


values = st.one_of(
    st.sampled_from([value for value, _ in NUMBERS.values()]),
    st.sampled_from(list(REFUSED.values())),
    st.floats(width=64),
    st.integers(),
    st.decimals(),
    st.fractions(),
    st.text(max_size=20),
    st.complex_numbers(),
    st.binary(max_size=8),
    st.floats().map(Lies),
)


@given(
    st.lists(
        st.tuples(
            values,
            st.dictionaries(st.sampled_from(SCALARS), values, max_size=6),
            st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8) | st.sampled_from(["kl", "lr"]), values),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60)
def test_anything_at_all(tmp_path_factory, rows):
    """Nothing is raised, the guard sees on, and a resumed one knows the same."""
    folder = tmp_path_factory.mktemp("any")
    guard = KLGuard(output_dir=folder, announce=False)
    for step, (window, scalars, logged) in enumerate(rows, start=1):
        guard.observe(step, window=window, **scalars)
        guard.log(logged, step)
        guard.observe(window, 0.1)
        guard.log(logged, key="kl")
    guard.close()
    assert not guard.blind
    path = folder / "kl_guard" / "journal.jsonl"
    if path.exists():
        records, notes = read_journal(path)
        assert not notes
        assert repr(list(recall(records).history)) == repr(list(guard.history))
        render(story_of(folder / "kl_guard")).encode("utf-8", "strict")


@pytest.mark.parametrize("name", ["kl", "\x1b[31mkl", "<script>"])
def test_the_command_shows_names_as_plain_text(tmp_path, capsys, name):
    """A log of such names, replayed."""
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({"step": i, name: kl}) + "\n" for i, kl in enumerate(blow_up(), start=1)))
    main(["replay", str(path), "--key", name])
    shown = capsys.readouterr()
    assert "\x1b[31m" not in shown.out + shown.err
