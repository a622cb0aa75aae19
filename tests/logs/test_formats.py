"""Every format gives what the run itself gave; broken files give a message or their good part."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writers import WRITERS, jsonl, state_of

from kl_guard import GuardConfig, KLGuard, replay
from kl_guard.logs import open_log, read_rows


def make_run(seed=3, steps=80, departure=40, zero=False):
    """A noisy run whose KL doubles every five steps from `departure` on."""
    rng = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        kl = 0.02 * 1.15 ** max(0, step - departure) * rng.lognormvariate(0, 0.2)
        rows.append({"step": step, "kl": 0.0 if zero else kl, "reward": rng.random(), "loss": rng.gauss(0, 0.1)})
    return rows


RUN = make_run()


def told(findings):
    return [(f.signature, f.severity, f.step, f.onset_step, f.departure_step) for f in findings]


def observed(run):
    guard, findings = KLGuard(announce=False, rank=0), []
    for row in run:
        findings += guard.observe(row["step"], row["kl"], reward=row["reward"], loss=row["loss"]).findings
    return told(findings)


EXPECTED = observed(RUN)


def test_the_run_of_these_tests_blows_up():
    """So that equal findings mean something."""
    assert [signature for signature, *_ in EXPECTED][:2] == ["KL_GROWTH", "KL_BLOWUP"]


@pytest.mark.parametrize("kind", WRITERS)
def test_each_format_gives_the_findings_of_the_run(tmp_path, kind):
    """The same signatures at the same steps, with the same onset and departure."""
    if kind == "events":
        pytest.importorskip("tensorboard")
    WRITERS[kind](tmp_path / "log", RUN)
    result = replay(tmp_path / "log")
    assert told(result.findings) == EXPECTED
    assert result.observations == len(RUN)
    assert result.source.kind == "k3"


def test_guard_log_gives_the_findings_of_the_run():
    """One dictionary per step, in verl's names, without the guard being told which is which."""
    guard, findings = KLGuard(announce=False, rank=0), []
    for row in RUN:
        metrics = {"actor/kl_loss": row["kl"], "critic/score/mean": row["reward"], "actor/pg_loss": row["loss"]}
        findings += guard.log({**metrics, "actor/ppo_kl": 0.1, "timing_s/gen": 3.0}, step=row["step"]).findings
    assert told(findings) == EXPECTED


def test_the_other_kls_are_listed_and_key_decides(tmp_path):
    """Policy to reference is preferred; the user may want another."""
    WRITERS["verl_console"](tmp_path / "log", RUN)
    source = replay(tmp_path / "log").source
    assert (source.name, source.kind, source.others) == ("actor/kl_loss", "k3", ("actor/ppo_kl",))
    other = replay(tmp_path / "log", key="actor/ppo_kl")
    assert (other.source.name, other.source.kind, other.findings) == ("actor/ppo_kl", "old_policy", ())
    with pytest.raises(ValueError, match=r"log: there is no 'kl'; there are: actor/kl_loss, actor/pg_loss"):
        replay(tmp_path / "log", key="kl")


def test_of_several_runs_the_fullest_is_read(tmp_path):
    """A W&B export of a comparison: columns of one run are not mixed with another's."""
    lines = ["Step,a - kl,a - reward,b - kl,b - reward"]
    lines += [
        f"{row['step']},{row['kl'] if row['step'] < 9 else ''},7.0,{row['kl']!r},{row['reward']!r}" for row in RUN
    ]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    result = replay(tmp_path / "log")
    assert (result.source.name, result.source.others) == ("b - kl", ("a - kl",))
    assert replay(tmp_path / "log", key="a - kl").source.name == "a - kl"


def test_the_kind_is_that_of_the_log_unless_the_user_says(tmp_path):
    """A sum over a sequence of 40 nats is no blow-up of 40 nats per token."""
    jsonl(tmp_path / "log", [{"step": step, "objective/kl": 150.0 + step % 3} for step in range(1, 60)])
    result = replay(tmp_path / "log")
    assert (result.source.kind, result.decision.action) == ("sequence_sum", "continue")
    assert replay(tmp_path / "log", kl_kind="k3").decision.action == "halt"
    assert replay(tmp_path / "log", GuardConfig(kl_kind="k1")).source.kind == "k1"


def test_a_k3_below_zero_is_k1(tmp_path):
    """RLOO logs k1 under the name that GRPO has for k3."""
    jsonl(tmp_path / "log", [{"step": step, "kl": 0.01 * (-1) ** step} for step in range(1, 40)])
    result = replay(tmp_path / "log")
    assert (result.source.kind, result.findings) == ("k1", ())
    assert "read as k1" in result.notes[0]
    assert replay(tmp_path / "log", kl_kind="k3").findings[0].signature == "KL_NEGATIVE"


@pytest.mark.parametrize(("digits", "signatures"), [(3, []), (12, ["KL_FROZEN"])])
def test_zeros_of_a_rounded_log_are_no_frozen_kl(tmp_path, digits, signatures):
    """Old consoles print three digits: 0.000 may be a small KL. A log that shows more does not round."""
    run = make_run(zero=True)
    lines = [
        f"step:{r['step']} - actor/kl_loss:{r['kl']:.{digits}f} - critic/score/mean:{r['reward']:.{digits}f} - "
        f"actor/grad_norm:{0.0:.{digits}f} - actor/lr:1e-06"
        for r in run
    ]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    assert [f.signature for f in replay(tmp_path / "log").findings] == signatures
    assert replay(tmp_path / "log", rounded=True).findings == ()


def test_windows_of_a_trainer_state(tmp_path):
    """TRL logs means over `logging_steps`."""
    (tmp_path / "log").write_text(state_of([{"step": s, "loss": 0.1, "kl": 0.01} for s in (10, 20, 25)]))
    assert [row["window"] for row in read_rows(tmp_path / "log")] == [10, 10, 5]


def test_a_torn_newest_checkpoint_is_passed_over(tmp_path):
    """A run that was killed while it saved."""
    WRITERS["output_dir"](tmp_path / "out", RUN)
    (tmp_path / "out" / "checkpoint-90").mkdir()
    (tmp_path / "out" / "checkpoint-90" / "trainer_state.json").write_text('{"log_history": [')
    result = replay(tmp_path / "out")
    assert told(result.findings) == EXPECTED
    assert "is read instead" in result.notes[0]


def test_kl_in_some_rows_only(tmp_path):
    """A tracker that counts its own logs: what was logged since the last KL belongs to the next."""
    rows = [row for r in RUN for row in ({"reward": r["reward"]}, {"loss": r["loss"]}, {"kl": r["kl"]})]
    jsonl(tmp_path / "log", [{"_step": number, **row} for number, row in enumerate(rows)])
    result = replay(tmp_path / "log")
    assert [f.signature for f in result.findings] == [signature for signature, *_ in EXPECTED]
    assert result.observations == len(RUN)
    assert any("fewer than half" in note for note in result.notes)


def replayed(path):
    """What a replay gives: the result, or the message of a ValueError; anything else is a failure."""
    try:
        return replay(path), ""
    except ValueError as error:
        return None, str(error)


def broken(data):
    return {
        "truncated": data[: int(len(data) * 0.7) + 3],
        "binary": bytes(range(256)) * 40,
        "empty": b"",
        "wrong delimiter": data.replace(b",", b"|").replace(b":", b"=").replace(b" - ", b" ~ ").replace(b";", b"|"),
        "long line": data[:2000] + b"x" * 10_000_000,
    }


@pytest.mark.parametrize("damage", ["truncated", "binary", "empty", "wrong delimiter", "long line"])
@pytest.mark.parametrize("kind", WRITERS)
def test_broken_files(tmp_path, kind, damage):
    """A clear message with the path, or the good part with a note; never another exception."""
    if kind == "events":
        pytest.importorskip("tensorboard")
    path = tmp_path / "log"
    WRITERS[kind](path, RUN)
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.name != "aside"]
    for file in files:
        file.write_bytes(broken(file.read_bytes())[damage])
    result, message = replayed(path)
    if result is None:
        assert str(tmp_path) in message
        assert len(message) < 2_000
    else:
        whole = kind in ("console", "console_strings", "console_with_steps", "verl_console", "packed", "events")
        assert result.notes or damage == "truncated" or whole
        assert 0 < result.observations <= len(RUN)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), cut=st.integers(0, 3000), kind=st.sampled_from(["jsonl", "wide_csv", "console"]))
def test_any_bytes_amid_a_log(tmp_path, data, cut, kind):
    """Whatever stands in a file, it is rows or a ValueError."""
    path = tmp_path / "log"
    WRITERS[kind](path, RUN[:20])
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + data + whole[cut:])
    result, message = replayed(path)
    assert result is not None or str(path) in message


def test_a_row_that_cannot_be_read_has_path_and_line(tmp_path):
    """Where to look in the file."""
    (tmp_path / "log").write_text("step,kl\n1,0.5\n\n2,oops\n")
    with pytest.raises(ValueError, match=r"log: line 4, row 2: kl must be a number .*'oops'"):
        replay(tmp_path / "log")


def test_what_a_folder_must_have(tmp_path):
    """The message names what was looked for."""
    with pytest.raises(ValueError, match=r"a folder without trainer_state\.json"):
        open_log(tmp_path)
