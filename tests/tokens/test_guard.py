"""Tokens in the guard: what is observed, written, remembered; and what is wrong is said once."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest
import torch

from kl_guard import GuardConfig, KLGuard, incidents, replay
from kl_guard.report import story_of
from kl_guard.tokens import summarize_tokens


def tokens(scale=0.1, spike=None, seed=0, rows=8, width=60):
    """The summary of a batch; `spike` is the log-ratio of one token, of id 7."""
    generator = torch.Generator().manual_seed(seed)
    policy = -torch.rand(rows, width, generator=generator)
    reference = policy + scale * torch.randn(rows, width, generator=generator)
    ids = torch.randint(10, 50, (rows, width), generator=generator)
    if spike is not None:
        ids[3, 20], policy[3, 20], reference[3, 20] = 7, -1.0 - spike, -1.0
    return summarize_tokens(policy, reference, torch.ones(rows, width, dtype=torch.bool), ids)


def test_kl_comes_from_the_tokens():
    """Mean and maximum, unless they are given."""
    guard, summary = KLGuard(announce=False), tokens()
    guard.observe(step=1, tokens=summary)
    guard.observe(step=2, kl_mean=0.5, tokens=summary)
    stats = summary.read()
    assert guard.history[0].kl_mean == pytest.approx(stats.kl_mean)
    assert guard.history[0].kl_max == pytest.approx(stats.kl_max)
    assert guard.history[1].kl_mean == 0.5
    assert guard.history[1].kl_token_mean == pytest.approx(stats.kl_token_mean)


@pytest.mark.parametrize(("kind", "name"), [("k1", "k1_mean"), ("k2", "k2_mean"), ("k3", "kl_mean")])
def test_the_kind_of_kl_is_the_configured_one(kind, name):
    """One series holds one kind."""
    guard, summary = KLGuard(GuardConfig(kl_kind=kind), announce=False), tokens()
    guard.observe(step=1, tokens=summary)
    assert guard.history[0].kl_mean == pytest.approx(getattr(summary.read(), name))


def test_what_is_written(tmp_path):
    """A line for each step, the largest tokens with their text."""
    guard = KLGuard(output_dir=tmp_path, announce=False, token_text=lambda token_id: f"<{token_id}>")
    for step in range(1, 4):
        guard.observe(step=step, tokens=tokens(spike=9.0, seed=step))
    lines = [json.loads(line) for line in (tmp_path / "kl_guard" / "tokens.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    worst = lines[0]["outliers"][0]
    assert (worst["token_id"], worst["text"], worst["row"], worst["position"]) == (7, "<7>", 3, 20)
    assert worst["ref_logprob"] - worst["policy_logprob"] == pytest.approx(9.0)
    assert len(lines[0]["outliers"]) == 16


def test_rows_can_have_names(tmp_path):
    """A sample's id and the beginning of its prompt go with the token; not where no text may be written."""
    policy, mask = torch.zeros(2, 3), torch.ones(2, 3)
    reference = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    for folder, log_text in (("a", True), ("b", False)):
        named = summarize_tokens(policy, reference, mask, sample_ids=["x", "y"], prompts=["p" * 100, "q" * 100])
        guard = KLGuard(GuardConfig(log_text=log_text), output_dir=tmp_path / folder, announce=False)
        guard.observe(step=1, tokens=named.merged([tokens()]))
        line = json.loads((tmp_path / folder / "kl_guard" / "tokens.jsonl").read_text())
        assert line["outliers"][0]["sample"] == "y"
        assert line["outliers"][0].get("prompt") == ("q" * 80 if log_text else None)
    with pytest.raises(ValueError, match="prompts must have one entry for each row, got 1"):
        summarize_tokens(policy, reference, mask, prompts=["p"])


def test_a_finding_names_the_token():
    """Its text, position and both log-probs, and that it keeps coming back."""
    guard = KLGuard(announce=False, token_text=lambda token_id: f"tok{token_id}")
    for step in range(1, 6):
        guard.observe(step=step, tokens=tokens(spike=9.0, seed=step))
    first, last = [f for f in guard.findings if f.signature == "TOKEN_OUTLIER"]
    assert (first.severity.value, last.severity.value) == ("info", "warn")
    assert "'tok7' (id 7) at position 20" in last.causes[0].evidence
    assert "log-prob -10 by the policy, -1 by the reference" in last.causes[0].evidence
    assert "coming back: 'tok7' (id 7) in 5 steps" in last.causes[0].evidence


def test_a_resumed_run_remembers_its_tokens(tmp_path):
    """From tokens.jsonl, up to the step that it goes on from; detectors from the journal."""
    first = KLGuard(output_dir=tmp_path, announce=False)
    for step in range(1, 7):
        first.observe(step=step, tokens=tokens(spike=9.0, seed=step))
    first.close()
    second = KLGuard(output_dir=tmp_path, announce=False)
    second.resumed(4)
    assert second.outliers.ids()[0].token_id == 7
    assert second.outliers.ids()[0].steps == 4
    findings = second.observe(step=5, tokens=tokens(spike=9.0, seed=5)).findings
    assert [(f.signature, f.severity.value) for f in findings] == [("TOKEN_OUTLIER", "warn")]


def test_a_fresh_run_in_the_folder_begins_a_new_file(tmp_path):
    """The old one is put aside."""
    for _ in range(2):
        guard = KLGuard(output_dir=tmp_path, announce=False)
        guard.observe(step=1, tokens=tokens())
        guard.close()
    assert len((tmp_path / "kl_guard" / "tokens.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "kl_guard" / "tokens-earlier.jsonl").is_file()


@pytest.mark.parametrize("bad", [5, "tokens", torch.zeros(3), {"kl": 1}])
def test_what_are_no_tokens_is_said_once(caplog, bad):
    """The rest of the observation counts."""
    guard = KLGuard()
    with caplog.at_level(logging.WARNING, "kl_guard"):
        for step in range(1, 4):
            guard.observe(step=step, kl_mean=0.1, tokens=bad)
    assert len([r for r in caplog.records if "summarize_tokens" in r.getMessage()]) == 1
    assert len(guard.history) == 3
    assert not guard.blind


def test_a_tokenizer_that_raises_costs_the_text_only(caplog, tmp_path):
    """It is said once."""

    def broken(token_id):
        raise KeyError(token_id)

    guard = KLGuard(output_dir=tmp_path, token_text=broken)
    with caplog.at_level(logging.WARNING, "kl_guard"):
        for step in range(1, 4):
            guard.observe(step=step, tokens=tokens(seed=step))
    assert len([r for r in caplog.records if "the text of tokens is not known" in r.getMessage()]) == 1
    assert len((tmp_path / "kl_guard" / "tokens.jsonl").read_text().splitlines()) == 3


def test_a_disk_that_refuses_costs_the_lines(caplog, tmp_path, monkeypatch):
    """Said once; the decision does not depend on them."""
    guard = KLGuard(output_dir=tmp_path)
    guard.observe(step=1, tokens=tokens())

    def full(*, sync=False):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(guard._tokens._file._file, "flush", full)
    with caplog.at_level(logging.WARNING, "kl_guard"):
        for step in range(2, 5):
            guard.observe(step=step, tokens=tokens(seed=step))
    assert len([r for r in caplog.records if "tokens.jsonl" in r.getMessage()]) == 1
    assert len(guard.history) == 4
    assert not guard.blind


def test_torn_lines_are_left_out(tmp_path):
    """As a killed process leaves them."""
    first = KLGuard(output_dir=tmp_path, announce=False)
    for step in range(1, 4):
        first.observe(step=step, tokens=tokens(spike=9.0, seed=step))
    first.close()
    path = tmp_path / "kl_guard" / "tokens.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    second = KLGuard(output_dir=tmp_path, announce=False)
    second.resumed(3)
    assert second.outliers.ids()[0].steps == 2
    second.observe(step=4, tokens=tokens(spike=9.0, seed=4))
    second.close()
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 4


def test_nan_and_inf_are_written_as_text(tmp_path):
    """Bare NaN is no JSON."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    guard.observe(step=1, tokens=tokens(spike=math.nan))
    line = json.loads((tmp_path / "kl_guard" / "tokens.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["outliers"][0]["kl"] == "nan"
    second = KLGuard(output_dir=tmp_path, announce=False)
    second.resumed(1)
    assert math.isnan(second.outliers.at(1)[0].kl)


def test_the_journal_replays_to_the_same_findings(tmp_path):
    """What tokens said is in it, as far as detectors need it."""
    guard = KLGuard(GuardConfig(action="warn"), output_dir=tmp_path, announce=False)
    for step in range(1, 40):
        guard.observe(step=step, tokens=tokens(spike=9.0 if step % 2 else None, seed=step), entropy=1.5)
    guard.close()
    again = replay(tmp_path / "kl_guard" / "journal.jsonl", action="warn")
    assert [(f.signature, f.step, f.severity) for f in again.findings] == [
        (f.signature, f.step, f.severity) for f in guard.findings
    ]
    assert again.findings


@pytest.mark.parametrize("prompts", [[None] * 8, [[{"role": "user", "content": "x" * 500}]] * 8])
def test_prompts_of_any_kind(prompts):
    """None, or messages of a chat: 80 characters of what they look like."""
    batch = torch.zeros(8, 4)
    policy = batch - torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    summary = summarize_tokens(policy, batch, batch == 0, prompts=prompts)
    found = {outlier.prompt for outlier in summary.read().outliers}
    assert found == {None if prompts[0] is None else str(prompts[0])[:80]}


def test_tokens_that_cannot_be_read_cost_only_themselves(caplog):
    """A lost device, say: the scalars of the step count, one warning, and the ceiling still acts."""

    class Broken:
        def read(self):
            raise RuntimeError("CUDA error")

    guard = KLGuard(rank=0)
    for step in range(1, 4):
        decision = guard.observe(step=step, kl_mean=1e5, tokens=Broken())
    assert decision.action == "halt"
    assert not guard.blind
    assert caplog.text.count("tokens cannot be read") == 1


def test_text_of_an_earlier_process_is_not_taken_over(tmp_path):
    """What was written when text was allowed stays out of a run that must not have it."""
    first = KLGuard(output_dir=tmp_path, announce=False, token_text=lambda token_id: "SECRET")
    for step in range(1, 8):
        first.observe(step=step, tokens=tokens(spike=9.0, seed=step))
    first.close()
    again = KLGuard(GuardConfig(log_text=False), output_dir=tmp_path, announce=False)
    again.resumed(7)
    assert again.outliers.at(7)
    assert {outlier.text for step in range(1, 8) for outlier in again.outliers.at(step)} == {None}
    before = (tmp_path / "kl_guard" / "journal.jsonl").stat().st_size
    for step in range(8, 16):
        again.observe(step=step, tokens=tokens(spike=9.0, seed=step))
    again.close()
    assert "SECRET" not in (tmp_path / "kl_guard" / "journal.jsonl").read_bytes()[before:].decode()


def test_an_infinite_log_ratio_is_infinite_in_every_estimator():
    """Not a large finite number that some rule takes for a mean."""
    policy = torch.tensor([[-1.0, -math.inf]])
    stats = summarize_tokens(policy, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2)).read()
    assert (stats.k1_mean, stats.k2_mean, stats.kl_token_mean) == (-math.inf, math.inf, math.inf)


def test_the_token_named_is_the_one(tmp_path):
    """Of an infinite KL the infinite token; an id only where it stays the same, never one in the middle."""
    guard = KLGuard(announce=False)
    for step in range(1, 60):
        generator = torch.Generator().manual_seed(step)
        policy = -torch.rand(8, 60, generator=generator)
        reference, ids = policy.clone(), torch.randint(10, 50, (8, 60), generator=generator)
        policy[3, 20], ids[3, 20] = -math.inf, 7
        reference[3, 20] = -1.0
        guard.observe(step=step, tokens=summarize_tokens(policy, reference, torch.ones(8, 60), ids))
    (found,) = [f for f in guard.findings if f.signature == "TOKEN_OUTLIER" and f.severity == "warn"]
    assert "id 7" in found.causes[0].evidence
    other = KLGuard(announce=False)
    for step in range(1, 60):
        batch = tokens(spike=9.0, seed=step)
        stats = batch.read()
        moved = [replace(o, token_id=[11, 15, 19][step % 3]) if o.token_id == 7 else o for o in stats.outliers]
        other.observe(step=step, tokens=replace(stats, outliers=tuple(moved), id_of_share=[11, 15, 19][step % 3]))
    assert not [c for f in other.findings for c in f.causes if "one token is scored differently" in c.name]


def blown_up(folder, **knobs):
    """A run that is halted because the policy leaves the reference, one token above all."""
    config = GuardConfig(action="halt", **knobs)
    guard = KLGuard(config, output_dir=folder, announce=False, token_text=lambda token_id: f"<{token_id}>")
    for step in range(1, 60):
        scale = 0.1 * 1.3 ** max(0, step - 25)
        if guard.observe(step=step, tokens=tokens(scale=scale, spike=10 * scale, seed=step)):
            break
    guard.close()
    return guard.decision.reason


def test_an_incident_keeps_what_stands_around_the_tokens(tmp_path):
    """Read back as it was, by the report too."""
    reason = blown_up(tmp_path)
    kept = incidents.tokens_in(incidents.folder_of(tmp_path / "kl_guard", reason))
    assert kept.step == reason.step
    worst = kept.excerpts[0]
    place = kept.outliers[worst.outlier].position - worst.start
    assert kept.outliers[worst.outlier].kl == pytest.approx(worst.kl[place])
    assert worst.texts == tuple(f"<{token_id}>" for token_id in worst.token_ids)
    assert len(worst) > 20
    html = incidents.folder_of(tmp_path / "kl_guard", reason).joinpath("report.html").read_text()
    assert html.count('class="piece') > sum(len(excerpt) for excerpt in kept.excerpts)
    assert html.count(' largest"') == len(kept.excerpts)


def test_no_excerpt_where_no_text_may_be_kept(tmp_path):
    """Ids in their order are the text."""
    reason = blown_up(tmp_path, log_text=False)
    kept = incidents.tokens_in(incidents.folder_of(tmp_path / "kl_guard", reason))
    assert kept.outliers
    assert not kept.excerpts


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"tokens": 5}', '{"tokens": {"step": 1, "outliers": [{}]}}', "\x00"])
def test_an_incident_that_makes_no_sense_has_no_tokens(tmp_path, text):
    """The report takes those of the steps."""
    reason = blown_up(tmp_path)
    folder = incidents.folder_of(tmp_path / "kl_guard", reason)
    (folder / "incident.json").write_text(text)
    assert incidents.tokens_in(folder) is None
    assert story_of(tmp_path / "kl_guard").tokens.step == reason.step
