"""Ten thousand findings in a run: what is kept and written is bounded, and nothing is done once for each pair."""

from dataclasses import replace

import pytest

from interrupted import Interrupt
from kl_guard import Finding, KLGuard, Severity, blocks, shortening
from kl_guard.findings import Cause
from kl_guard.journal import Journal
from kl_guard.lines import encode
from kl_guard.memory import retell
from kl_guard.report import render, story_of
from some_tokens import stats

MANY = 10_000
LONG = "a message as findings have them, with some figures in it: 0.123456 " * 5


def journal_of(folder):
    return folder / "kl_guard" / "journal.jsonl"


def calls_in(work):
    """How many functions of the guard a piece of work calls."""
    counter = Interrupt()
    with counter.on():
        work()
    return counter.calls


def test_an_outlier_in_each_step(tmp_path, monkeypatch, caplog):
    """Said twice, counted ever after; the ten-thousandth step costs what the thousandth did."""
    monkeypatch.setattr(shortening, "EVERY", 1 << 18)
    for name, value in {"KEEP": 200, "SIZE": 200, "WORTH": 0}.items():
        monkeypatch.setattr(blocks, name, value)
    guard = KLGuard(output_dir=tmp_path)
    calls = {}
    for step in range(1, MANY + 1):
        plain = stats(0.02, 50.0 + step % 7)  # no ceiling, which would be another finding
        odd = replace(plain, top_share=0.9, outliers=plain.outliers[:2])
        if step in (1_000, MANY):
            calls[step] = calls_in(lambda at=step, tokens=odd: guard.observe(at, tokens=tokens))
        else:
            guard.observe(step, tokens=odd)
    guard.close()
    assert [(f.signature, f.severity) for f in guard.findings] == [
        ("TOKEN_OUTLIER", Severity.INFO),
        ("TOKEN_OUTLIER", Severity.WARN),
    ]
    assert len(caplog.records) == 1  # the first is information
    assert calls[MANY] < 1.5 * calls[1_000]
    assert len(guard.outliers) == 64
    assert journal_of(tmp_path).stat().st_size < MANY * len(encode(guard.history[-1].known())) / 2
    assert (tmp_path / "kl_guard" / "tokens.jsonl").stat().st_size < 4_000_000
    page = render(story_of(tmp_path / "kl_guard"))
    assert len(page.encode()) < 200_000


def a_finding(number, attempt=0):
    causes = tuple(Cause(f"cause {i}", LONG, LONG) for i in range(3))
    return Finding(
        "KL_BLOWUP", Severity.CRITICAL, 10 + number, LONG, 10, 9, attempt, evidence={"baseline": 0.02}, causes=causes
    )


def write_run(folder, findings, attempts=0):
    """A run that was resumed and halted again, or taken back, so many times."""
    path = journal_of(folder)
    path.parent.mkdir(parents=True)
    with path.open("w") as file:

        def write(**record):
            file.write(encode(record) + "\n")

        write(type="run", run_id="abc", config={})
        for number in range(findings):
            write(type="observation", attempt=0, step=10 + number, kl_mean=0.02)
            write(type="finding", time=0.0, finding=a_finding(number).to_dict())
            write(type="decision", signature="KL_BLOWUP", step=10 + number, action="halt", note="", to_step=None)
        for attempt in range(1, attempts + 1):
            for step in (1, 2, 3):
                write(type="observation", attempt=attempt, step=20_000 + step, kl_mean=0.02)
            write(type="rollback", to_step=20_000, attempt=attempt)
            write(type="checkpoint", step=20_000 + attempt, path=f"checkpoint-{attempt}", calm=True)
    return folder / "kl_guard"


@pytest.mark.parametrize(("findings", "attempts"), [(MANY, 0), (0, MANY // 10)], ids=["findings", "attempts"])
def test_a_report_of_many(tmp_path, findings, attempts):
    """It has the latest of them, says how many there are, and takes four times as long for four times as many."""
    sizes, calls = [], []
    for share in (4, 1):
        folder = write_run(tmp_path / f"{share}", findings // share, attempts // share)
        pages = []
        calls.append(calls_in(lambda folder=folder, pages=pages: pages.append(render(story_of(folder)))))
        sizes.append(len(pages[0].encode()))
        assert not findings or f"The last 200 of {findings // share}; the others are in the journal." in pages[0]
    assert max(sizes) < 1_000_000
    assert sizes[1] < 1.5 * sizes[0]
    assert calls[1] < 5 * calls[0]


def test_ten_thousand_lines_that_are_torn(tmp_path, caplog):
    """A few are named, of the others the number; no report of them is longer than one of a few."""
    path = journal_of(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"type":"run","run_id":"abc"}\n' + b'{"type":"observ\n{"typ\n' * (MANY // 2))
    guard = KLGuard(output_dir=tmp_path)
    guard.resumed(5)
    guard.observe(6, 0.02)
    guard.close()
    assert not guard.blind
    assert len(caplog.records) < 20
    assert any(f"{MANY - 10} more lines" in record.getMessage() for record in caplog.records)
    assert len(render(story_of(tmp_path / "kl_guard")).encode()) < 100_000


def test_ten_thousand_halts_of_one_guard(tmp_path, monkeypatch):
    """Resumed and halted again and again: a hundred incidents are kept, memory and what is retold stay small."""
    monkeypatch.setattr("kl_guard.incidents.write_report", lambda folder, target: target)
    monkeypatch.setattr("kl_guard.incidents.MOST", 10)
    guard = KLGuard(output_dir=tmp_path, announce=False, alerts=[])
    calls = {}

    def halt_again(number):
        for step in (1, 2, 3):
            decision = guard.observe(step, 1000.0, grad_norm=1.0)
        assert decision.action == "halt"
        guard.resumed(0)

    for number in range(1, 301):
        if number in (50, 300):
            calls[number] = calls_in(lambda at=number: halt_again(at))
        else:
            halt_again(number)
    guard.close()
    assert calls[300] < 1.2 * calls[50]
    assert sum(len(encode(record)) for record in retell(guard._memory)) < 20_000
    assert len(list((tmp_path / "kl_guard" / "incidents").iterdir())) <= 10
    assert len(list(Journal(tmp_path / "kl_guard").read())) > 900
