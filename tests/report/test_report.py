"""The report: what it says is what happened, whatever stands in a token or a log is text, and it stays small."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import HOSTILE, run_into_trouble

from kl_guard import Checkpoint
from kl_guard.cli import main
from kl_guard.history import History
from kl_guard.incidents import Tokens
from kl_guard.observation import Observation
from kl_guard.report import Story, render, story_of
from kl_guard.report.page import visible
from kl_guard.report.thinning import thinned
from kl_guard.token_stats import Excerpt, Outlier


class Page(HTMLParser):
    """Tags and text of a page, and whether every tag is closed."""

    VOID = frozenset({"meta", "br", "path", "img"})

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_it_is_there_at_the_moment_of_the_incident(tmp_path):
    """Beside incident.json, with what happened and what was done."""
    guard = run_into_trouble(tmp_path)
    reason = guard.decision.reason
    page = Page((tmp_path / "kl_guard" / "incidents" / f"0-{reason.step}-KL_BLOWUP" / "report.html").read_text())
    assert f"KL_BLOWUP at step {reason.step}" in page.text
    assert f"left its own regime at about step {reason.departure_step}" in page.text
    assert "The run was halted" in page.text
    assert "the learning rate is too high" in page.text
    assert "learning_rate=5e-07, warmup_steps=20" in page.words  # to copy
    assert {"departure", "onset", "alarm"} <= {
        value.split()[-1] for _, name, value in page.attributes if name == "class"
    }


def test_a_run_that_went_back(tmp_path):
    """Both attempts are drawn, the target is marked, and the command writes the same page."""
    guard = run_into_trouble(tmp_path, action="rollback")
    target = guard.go_back()
    guard.rolled_back(target.step)
    for step in range(target.step + 1, target.step + 10):
        guard.observe(step, 0.02)
    guard.close()
    story = story_of(tmp_path / "kl_guard")
    assert [attempt.back_to for attempt in story.attempts] == [target.step]
    assert len(story.attempts[0].history) > len(story.history)
    page = Page(render(story))
    assert f"went back to the checkpoint of step {target.step}" in page.text
    assert "KL mean, attempt 0" in page.text
    assert f"checkpoint {target.step}, target, pinned" in {v for _, name, v in page.attributes if name == "title"}
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == render(story)


def test_what_comes_from_outside_is_text(tmp_path):
    """Tokens, prompts, paths and names: nothing runs, nothing is loaded, nothing changes direction."""
    history = History()
    history.append(Observation(1, kl_mean=0.5))
    outliers = [Outlier(9.0, -9.0, -0.5, 7, 3, 0, text=text, prompt=text) for text in HOSTILE]
    excerpt = Excerpt(0, 3, (7,) * len(HOSTILE), (0.5,) * len(HOSTILE), tuple(HOSTILE))
    story = Story(
        title=HOSTILE[0],
        history=history,
        findings=(),
        tokens=Tokens(1, tuple(outliers), (excerpt,)),
        checkpoints=[Checkpoint(1, text) for text in HOSTILE],
        config={text: text for text in HOSTILE},
        notes=HOSTILE,
    )
    html = render(story)
    page = Page(html)
    assert not {"script", "img", "iframe", "link", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[1].startswith("on") or a[1] in {"src", "href"}]
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f]", html)
    assert "(10000 characters)" in page.text
    assert len(html) < 100_000


@given(st.text(max_size=50))
def test_any_text_is_only_text(text):
    """Whatever a tokenizer gives."""
    history = History()
    history.append(Observation(1, kl_mean=0.5))

    def page(text, prompt):
        outlier = Outlier(9.0, -9.0, -0.5, 7, 3, 0, sample=text, text=text, prompt=prompt)
        excerpt = Excerpt(0, 2, (5, 7, 9), (0.0, 9.0, None), (text, text, text))
        return Page(render(Story("run", history, (), tokens=Tokens(1, (outlier,), (excerpt,)))))

    assert page(text, text or "p").tags == page("t", "p").tags


def test_long_runs_stay_small(tmp_path):
    """100,000 steps: under a megabyte, and the peak is in it."""
    history = History()
    for step in range(1, 100_001):
        history.append(Observation(step, kl_mean=0.02 + 50 * (step == 61_803), kl_max=1.0, reward=0.1, entropy=0.5))
    html = render(Story("run", history, ()))
    assert len(html) < 1_000_000
    assert "KL mean from 0.02 to 50" in Page(html).text


def test_nothing_observed_and_nothing_finite():
    """Pages without a curve."""
    assert "Nothing has been observed yet." in Page(render(Story("run", History(), ()))).text
    history = History()
    for step in range(1, 5):
        history.append(Observation(step, kl_mean=math.nan, kl_max=math.inf))
    assert "4 observations up to step 4." in Page(render(Story("run", history, ()))).text


def test_it_asks_for_nothing(tmp_path):
    """No address in it, and a policy that forbids all."""
    run_into_trouble(tmp_path)
    html = render(story_of(tmp_path / "kl_guard"))
    assert not re.search(r"https?://|url\(|@import|<script", html)
    assert "default-src 'none'" in html


def test_it_can_be_read_without_seeing(tmp_path):
    """Language, headings in order, a text for every chart, names for table columns."""
    run_into_trouble(tmp_path)
    page = Page(render(story_of(tmp_path / "kl_guard")))
    assert ("html", "lang", "en") in page.attributes
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    charts = [a for a in page.attributes if a[1] == "role" and a[2] == "img"]
    labels = [a for a in page.attributes if a[1] == "aria-label"]
    assert len(charts) == len(labels) > 1


def test_a_report_that_cannot_be_written_costs_only_itself(tmp_path, monkeypatch, caplog):
    """The decision and incident.json stand, one warning."""

    def broken(*_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("kl_guard.incidents.write_report", broken)
    guard = run_into_trouble(tmp_path)
    assert guard.decision.action == "halt"
    assert not guard.blind
    assert list(tmp_path.rglob("incident.json"))
    assert caplog.text.count("the report could not be written") == 1


@pytest.mark.parametrize(
    ("command", "message"), [("report", "no guard has watched"), ("tokens", "no guard has watched")]
)
def test_a_folder_without_a_guard(tmp_path, capsys, command, message):
    """Said in one line."""
    assert main([command, str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), min_size=1, max_size=80), st.integers(4, 20))
def test_thinning_keeps_the_extremes(values, most):
    """In order, at most so many, and both extremes are there."""
    points = thinned(range(len(values)), values, most)
    assert len(points) <= max(most, len(values) if len(values) <= most else 0)
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    kept = [value for _, value in points if value is not None]
    assert (max(finite, default=None), min(finite, default=None)) == (max(kept, default=None), min(kept, default=None))


def test_what_is_not_printable_is_written_out():
    """Newlines too: a token may be one."""
    assert visible("a\nb\u200b") == "a\\nb\\u200b"
