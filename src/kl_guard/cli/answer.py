"""What a replay says about a finished run, for people and for programs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kl_guard.checkpoints.manifest import size_of
from kl_guard.checkpoints.soundness import problems
from kl_guard.cli import tables, terminal
from kl_guard.cli.curve import sparkline
from kl_guard.config import GuardConfig
from kl_guard.findings import Checkpoint
from kl_guard.history import History
from kl_guard.logs import open_log
from kl_guard.messages import describe
from kl_guard.progress import Shown, Told, counted, unseen
from kl_guard.replaying import ReplayResult, judged
from kl_guard.report import Story
from kl_guard.series import from_log


@dataclass(frozen=True)
class Answer:
    """A replayed log: what the guard said, where one could have gone back to, and what a halt would have saved."""

    log: str
    result: ReplayResult
    history: History
    setting: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    there: dict[int, Path] = field(default_factory=dict)
    unsound: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    hours_saved: float | None = None
    money_saved: float | None = None

    @property
    def steps(self) -> Sequence[int]:
        """The steps that were observed."""
        return self.history.steps

    @property
    def kl(self) -> list[float | None]:
        """Their KL."""
        return list(self.history.column("kl_mean"))

    @property
    def steps_after(self) -> int:
        """Steps that were made after the guard would have stopped the run."""
        fired = self.result.fired_at
        return 0 if fired is None else self.steps[-1] - fired

    def story(self) -> Story:
        """Return what a report of it shows."""
        decision = self.result.decision
        shown = [
            Checkpoint(step, str(path), calm=decision.reason is None or step < decision.reason.step)
            for step, path in sorted(self.there.items())
        ]
        back = next((c.step for c in shown if c.path == self.checkpoint), None)
        source = [] if self.result.source is None else [str(self.result.source)]
        return Story(
            title=self.log,
            history=self.history,
            findings=self.result.findings,
            reason=decision.reason,
            action=decision.action,
            note="by this replay" if decision else "",
            target=back,
            checkpoints=shown,
            config=self.config,
            notes=[*source, *self.result.notes],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values, ready for JSON."""
        source = self.result.source
        told = {
            "log": self.log,
            "setting": self.setting,
            "kl": None if source is None else {"name": source.name, "kind": source.kind, "others": source.others},
            "observations": self.result.observations,
            "last_step": self.steps[-1] if self.steps else None,
            "action": self.result.decision.action,
            "fired_at": self.result.fired_at,
            "onset_step": self.result.onset_step,
            "departure_step": self.result.departure_step,
            "checkpoint": self.checkpoint,
            "steps_after": self.steps_after,
            "hours_saved": self.hours_saved,
            "money_saved": self.money_saved,
            "findings": [finding.to_dict() for finding in self.result.findings],
            "notes": list(self.result.notes),
        }
        return {name: _plain(value) for name, value in told.items()}


@dataclass(frozen=True)
class Question:
    """What is asked of a log: the knobs, of which `setting` are those that a sweep varies, and what a run costs."""

    knobs: dict[str, Any]
    setting: dict[str, Any]
    hours: float | None = None
    cost_per_hour: float | None = None


def answers(
    log: str, key: str | None, questions: Sequence[Question], shown: Shown = unseen, *, checkpoints: bool = True
) -> Iterator[Answer]:
    """Yield the answer of a log to each question; the log is read once. `shown` shows how far it is.

    With `checkpoints` those that lie beside the log are looked into.

    Raises
    ------
    ValueError, TypeError, OSError
        For a log or a knob that cannot be taken; the message has which.
    """
    configs = [GuardConfig.build(**question.knobs) for question in questions]
    opened, name = open_log(log), Path(log).name or log
    with shown(f"reading {name}") as told:
        opened.on_share = told
        series = from_log(opened, key)
        if len(questions) > 1:
            series.hold()
        else:
            results = [judged(series, configs[0], questions[0].knobs)]
    if len(questions) > 1:
        with shown(f"replaying {name} {len(questions)} times") as told:
            results = []
            for number, (config, question) in enumerate(zip(configs, questions, strict=True)):
                series.on_share = partial(_within, told, number, len(questions))
                results.append(judged(series, config, question.knobs))
    there = _checkpoints(Path(log)) if checkpoints else {}
    sound = _Sound(there, shown)
    for question, config, (result, history) in zip(questions, configs, results, strict=True):
        checkpoint: str | None = None
        unsound: dict[str, str] = {}
        if result.departure_step is not None:
            index = history.index(result.departure_step)
            first = history[index].first_step if index < len(history) else result.departure_step
            checkpoint, unsound = sound.newest_before(first - 1)
        saved = _hours_saved(history.steps, result, question.hours, series.seconds)
        money = None if saved is None or question.cost_per_hour is None else saved * question.cost_per_hour
        yield Answer(log, result, history, question.setting, checkpoint, there, unsound, asdict(config), saved, money)


def _within(told: Told, part: int, parts: int, share: float) -> None:
    """Tell the share of the whole, from that of one of its parts."""
    told((part + share) / parts)


def as_text(one: Answer) -> str:
    """Return the answer as text."""
    result, lines = one.result, []
    head = (
        f"{terminal.in_one_line(one.log)}: {result.observations} observations, steps {one.steps[0]} to {one.steps[-1]}"
    )
    lines.append(terminal.wrapped(head + (f"; {terminal.in_one_line(str(result.source))}" if result.source else "")))
    lines += [terminal.wrapped(terminal.in_one_line(f"note: {note}")) for note in result.notes]
    finite = [kl for kl in one.kl if kl is not None and math.isfinite(kl)]
    if finite:
        curve = sparkline(one.kl, terminal.width() - 4, plain=terminal.plain())
        lines += ["", f"KL  {curve}", f"    {min(finite):.3g} to {max(finite):.3g}", ""]
    for finding in result.findings:
        lines.append(terminal.painted(terminal.wrapped(describe(finding), "    "), str(finding.severity)))
    lines.append(_verdict(one))
    return "\n".join(lines)


def table(answers: list[Answer]) -> str:
    """Return several answers, one line each."""
    names = list(dict.fromkeys(name for one in answers for name in one.setting))
    logs = {one.log for one in answers}
    short = len({Path(log).name for log in logs}) == len(logs)
    columns = {"log": True, **dict.fromkeys(names, False)}
    columns |= dict.fromkeys(("steps", "alarm", "onset", "departure"), False)
    columns |= {"go back to": True, "findings": True}
    rows = []
    for one in answers:
        result = one.result
        numbers = [one.steps[-1] if one.steps else None, result.fired_at, result.onset_step, result.departure_step]
        back = Path(one.checkpoint).name if one.checkpoint else None
        said = ", ".join(dict.fromkeys(finding.signature for finding in result.findings))
        log = Path(one.log).name if short else one.log
        rows.append([log, *(one.setting.get(name) for name in names), *numbers, back, said])
    return tables.table(columns, rows)


def _verdict(one: Answer) -> str:
    result = one.result
    if result.fired_at is None:
        acted = [finding for finding in result.findings if finding.severity == "warn"]
        text = "Nothing here would have stopped the run" + (", but look at the warnings." if acted else ".")
        return terminal.painted(terminal.wrapped(text), "warn" if acted else "good")
    lines = [f"Stop at step {result.fired_at}: {_steps(one.steps_after)} were made after it."]
    if result.departure_step is not None:
        lines.append(f"The curve left its own regime at about step {result.departure_step}.")
    if one.checkpoint is not None:
        lines.append(f"Go back to {terminal.in_one_line(one.checkpoint)}, the newest checkpoint here from before that.")
    elif one.unsound:
        wrong = "; ".join(f"{name}: {why}" for name, why in list(one.unsound.items())[:3])
        lines.append(terminal.in_one_line(f"No checkpoint from before that is whole ({wrong})."))
    elif one.there:
        lines.append(f"None of the {len(one.there)} checkpoints beside this log is from before that.")
    if one.hours_saved is not None:
        money = "" if one.money_saved is None else f", at this price {one.money_saved:,.2f}"
        lines.append(f"A halt would have saved {one.hours_saved:,.1f} hours{money}.")
    elif one.money_saved is None and one.steps_after:
        lines.append("How long it took is not in the log; --hours and --cost-per-hour say what that was worth.")
    return terminal.painted(terminal.wrapped(" ".join(lines)), "critical")


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _checkpoints(log: Path) -> dict[int, Path]:
    """Return the checkpoints beside a log, by step: in its folder, or the folder above a checkpoint's."""
    folder = log if log.is_dir() else log.parent
    for place in (folder, folder.parent):
        matches = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in place.glob("checkpoint-*"))
        found = {int(match[1]): path for match, path in matches if match and path.is_dir()}
        if found:
            return found
    return {}


class _Sound:
    """The checkpoints beside a log, each looked into once."""

    def __init__(self, there: dict[int, Path], shown: Shown) -> None:
        self._there = there
        self._shown = shown
        self._known: dict[int, str | None] = {}

    def newest_before(self, behind: int) -> tuple[str | None, dict[str, str]]:
        """Return the newest sound checkpoint of a step before `behind`, the update that is suspect already.

        And what is wrong with those that are newer, by name.
        """
        unsound: dict[str, str] = {}
        for step in sorted((step for step in self._there if step < behind), reverse=True):
            if step not in self._known:
                path = self._there[step]
                with self._shown(f"checking {path.name}") as told:
                    wrong = next(problems(path, on_bytes=counted(told, size_of(path))), None)
                self._known[step] = wrong
            why = self._known[step]
            if why is None:
                return str(self._there[step]), unsound
            unsound[self._there[step].name] = why
        return None, unsound


def _hours_saved(
    steps: Sequence[int], result: ReplayResult, hours: float | None, seconds: float | None
) -> float | None:
    fired = result.fired_at
    if fired is None or not steps:
        return None
    total = hours if hours is not None or seconds is None else seconds / 3600
    return None if total is None else total * (steps[-1] - fired) / max(1, steps[-1])


def _plain(value: Any) -> Any:
    """Return values without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
