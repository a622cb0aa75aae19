"""The page: words and charts put into the template; whatever comes from a model or a log is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kl_guard.history import History
from kl_guard.incidents import Tokens
from kl_guard.messages import headline, what_happened, what_was_done
from kl_guard.report.chart import Chart, Line, Mark, Scale, Steps, number, path
from kl_guard.report.story import Story
from kl_guard.report.thinning import thinned
from kl_guard.token_stats import Excerpt, Outlier

LONGEST = 200  # characters of a token or prompt that are shown
OTHERS = {
    "reward": "Reward",
    "entropy": "Entropy",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "beta": "Weight of the KL penalty (beta)",
}
MOST_FINDINGS = 200  # listed, the latest; runs that are resumed into the same trouble have many
MOST_NOTES = 10
MOST_EVENTS = 60  # checkpoints drawn
SPREAD = 5.0  # between the largest and the smallest value, from which on an axis is logarithmic


@dataclass(frozen=True)
class ShownToken:
    """An outlier token as the page shows it; `heat` is 0 to 4 by its KL."""

    text: str
    prompt: str
    heat: int
    kl: str
    outlier: Outlier


@dataclass(frozen=True)
class Piece:
    """A token in its sequence; `heat` None where it does not count, `kl` what to say of it."""

    text: str
    kl: str
    heat: int | None
    largest: bool


@dataclass(frozen=True)
class ShownExcerpt:
    """A piece of a completion: where it is, how its prompt begins, and its tokens."""

    where: str
    prompt: str
    pieces: Sequence[Piece]


def render(story: Story) -> str:
    """Return the report as HTML: no scripts, nothing from elsewhere.

    Raises
    ------
    ImportError
        Without jinja2.
    """
    steps = _steps(story)
    page: str = _template().render(
        story=story,
        title=_title(story),
        sentences=_sentences(story),
        kl=_kl_chart(story, steps),
        charts=[_chart(story, name, title, steps) for name, title in OTHERS.items() if _known(story.history, name)],
        tokens=[_token(outlier) for outlier in story.tokens.outliers] if story.tokens else [],
        excerpts=[_excerpt(story.tokens, excerpt) for excerpt in story.tokens.excerpts] if story.tokens else [],
        tried=[_settings(cause.settings) for cause in story.reason.causes] if story.reason else [],
        headline=headline,
        findings=story.findings[-MOST_FINDINGS:],
        notes=story.notes[:MOST_NOTES],
        number=number,
        steps=steps,
    )
    return page


@lru_cache(maxsize=1)
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("kl_guard.report"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    return environment.get_template("report.html")


def visible(text: Any, longest: int = LONGEST) -> str:
    r"""Return text in which control characters and marks of direction are written out, cut to a length.

    >>> visible("a\u202eb\x00")
    'a\\u202eb\\x00'
    """
    whole = str(text)
    cut = whole[:longest]
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)
    return shown + (f"… ({len(whole)} characters)" if len(whole) > longest else "")


def _title(story: Story) -> str:
    if story.reason is not None:
        return f"{story.reason.signature} at step {story.reason.step}"
    worst = max(story.findings, key=lambda finding: finding.severity.rank, default=None)
    return f"{worst.signature} at step {worst.step}" if worst else "No finding"


def _sentences(story: Story) -> list[str]:
    """Return two sentences: what happened, and what was done about it."""
    if not len(story.history):
        return ["Nothing has been observed yet."]
    if story.reason is None:
        count = len(story.history)
        said = "Nothing acted on the run" if not story.findings else f"{len(story.findings)} findings, none acted on"
        return [f"{count} observations up to step {story.history.steps[-1]}.", f"{said}."]
    done = what_was_done(story.action, story.target, story.note)
    return [f"{what_happened(story.reason)}.", f"{done}."]


def _steps(story: Story) -> Steps:
    histories = [story.history, *(attempt.history for attempt in story.attempts)]
    ends = [history.steps[-1] for history in histories if len(history)]
    starts = [history.steps[0] for history in histories if len(history)]
    return Steps(min(starts, default=0), max(ends, default=1))


def _known(history: History, name: str) -> bool:
    return any(math.isfinite(value) for value in history.column(name))


def _kl_chart(story: Story, steps: Steps) -> Chart | None:
    lines = [
        ("mean", "KL mean", _points(story.history, "kl_mean")),
        ("max", "KL max", _points(story.history, "kl_max")),
    ]
    for one in story.attempts:
        lines += [("earlier", f"KL mean, attempt {one.number}", _points(one.history, "kl_mean"))]
    levels = _levels(story)
    values = [v for _, _, points in lines for _, v in points if v is not None] + [value for value, *_ in levels]
    if not values:
        return None
    scale = Scale(values, logarithmic=True)
    means = [value for _, value in lines[0][2] if value is not None]
    summary = f"KL mean from {number(min(means))} to {number(max(means))}" if means else "No finite KL mean"
    if story.reason is not None and story.reason.departure_step is not None:
        summary += f", leaving its own regime at about step {story.reason.departure_step}"
    chart = Chart("KL to the reference, nats per token", f"{summary}.")
    chart.lines = [Line(kind, name, path(points, steps, scale)) for kind, name, points in lines if _any(points)]
    chart.ticks = [Mark(_from_top(scale, value), "tick", number(value)) for value in scale.ticks()]
    chart.levels = [Mark(_from_top(scale, value), kind, text) for value, kind, text in levels]
    chart.events = _events(story, steps)
    return chart


def _levels(story: Story) -> list[tuple[float, str, str]]:
    evidence = story.reason.evidence if story.reason is not None else {}
    found = []
    for name, kind in (("baseline", "baseline"), ("threshold", "threshold")):
        value = evidence.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value) and value > 0:
            found.append((float(value), kind, f"{name} {number(float(value))}"))
    return found


def _events(story: Story, steps: Steps) -> list[Mark]:
    marks = []
    reason = story.reason
    if reason is not None:
        for kind, step in (("departure", reason.departure_step), ("onset", reason.onset_step), ("alarm", reason.step)):
            if step is not None:
                marks.append(Mark(steps.percent(step), kind, f"{kind} {step}"))
    for attempt in story.attempts:
        if attempt.back_to is not None:
            text = f"attempt {attempt.number} went back to {attempt.back_to}"
            marks.append(Mark(steps.percent(attempt.back_to), "back", text))
    for checkpoint in list(story.checkpoints)[-MOST_EVENTS:]:
        kind = "target" if checkpoint.step == story.target else "calm" if checkpoint.calm else "bad"
        pinned = ", pinned" if checkpoint.step in story.pinned else ""
        marks.append(
            Mark(steps.percent(checkpoint.step), f"checkpoint {kind}", f"checkpoint {checkpoint.step}, {kind}{pinned}")
        )
    return marks


def _chart(story: Story, name: str, title: str, steps: Steps) -> Chart:
    points = _points(story.history, name)
    values = [value for _, value in points if value is not None]
    spread = min(values) > 0 and max(values) > SPREAD * min(values)
    scale = Scale(values, logarithmic=name in {"grad_norm", "learning_rate"} and spread)
    steady = min(values) == max(values)
    chart = Chart(
        title, f"{number(values[0])} throughout." if steady else f"From {number(values[0])} to {number(values[-1])}."
    )
    chart.lines = [Line("mean", title, path(points, steps, scale))]
    chart.ticks = [Mark(_from_top(scale, value), "tick", number(value)) for value in scale.ticks()]
    if story.reason is not None and story.reason.departure_step is not None:
        chart.events = [Mark(steps.percent(story.reason.departure_step), "departure", "departure")]
    return chart


def _points(history: History, name: str) -> list[tuple[int, float | None]]:
    return thinned(list(history.steps), list(history.column(name)))


def _any(points: Sequence[tuple[int, float | None]]) -> bool:
    return any(value is not None for _, value in points)


def _from_top(scale: Scale, value: float) -> float:
    return round(100 * (1 - scale.place(value)), 2)


def _token(outlier: Outlier) -> ShownToken:
    text = (
        outlier.text if outlier.text is not None else f"id {outlier.token_id}" if outlier.token_id is not None else "?"
    )
    return ShownToken(text, outlier.prompt or "", _heat(outlier.kl), number(outlier.kl), outlier)


def _heat(kl: float) -> int:
    return sum(kl > limit for limit in (0.1, 1.0, 10.0, 100.0)) if not math.isnan(kl) else 4


def _excerpt(tokens: Tokens, excerpt: Excerpt) -> ShownExcerpt:
    largest = tokens.outliers[excerpt.outlier]
    texts = excerpt.texts or (None,) * len(excerpt)
    pieces = [
        Piece(
            f"id {token_id}" if text is None else text,
            "does not count" if kl is None else f"KL {number(kl)}",
            None if kl is None else _heat(kl),
            excerpt.start + i == largest.position,
        )
        for i, (token_id, kl, text) in enumerate(zip(excerpt.token_ids, excerpt.kl, texts, strict=True))
    ]
    row = f"row {largest.row}" if largest.sample is None else f"sample {largest.sample}"
    batch = f", batch {largest.part}" if largest.part else ""
    rank = f", rank {largest.rank}" if largest.rank else ""
    where = f"positions {excerpt.start} to {excerpt.start + len(excerpt) - 1} of {row}{batch}{rank}"
    return ShownExcerpt(where, largest.prompt or "", pieces)


def _settings(settings: Mapping[str, Any]) -> str:
    """Return settings as arguments to copy.

    >>> _settings({"learning_rate": 5e-07, "warmup_steps": 20})
    'learning_rate=5e-07, warmup_steps=20'
    """
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
