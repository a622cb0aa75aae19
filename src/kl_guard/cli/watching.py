"""`kl-guard watch`: follows a log that is being written, for people who cannot touch the training code."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_guard.cli import knobs, terminal

if TYPE_CHECKING:
    import subprocess

    from kl_guard import Decision, Finding, KLGuard
    from kl_guard.alerts import Alerts
    from kl_guard.logs import Follower
    from kl_guard.logs.text import Notes

CRITICAL = 1
LONGEST = 1e6  # seconds
SILENCE = 60.0  # seconds without a KL after which that is said
ROWS = 20  # or so many rows
NAMES = 40  # that are told
PATIENCE = 2.0  # seconds that printing waits for the end of the command, so that the output of each stands by itself


def add_to(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch",
        help="follow a log that is being written",
        description="Follow a growing log (JSON lines, console output, CSV), through rotation and truncation. Exits "
        "with 1 on a critical finding.",
    )
    parser.add_argument("log", type=terminal.path, metavar="LOG", help="a file; it may come later")
    parser.add_argument("--key", help="name of the KL in the log, where the guard shall not choose")
    parser.add_argument(
        "--on-critical",
        metavar="CMD",
        help="a shell command to run on a critical finding; its environment has KL_GUARD_SIGNATURE, KL_GUARD_STEP, "
        "KL_GUARD_ONSET, KL_GUARD_DEPARTURE and KL_GUARD_LOG",
    )
    parser.add_argument(
        "--alert",
        action="append",
        metavar="URL",
        help="an apprise URL to send an alert to on a critical finding; may be given again. Others on the machine see "
        "it in the list of processes: the environment variable KL_GUARD_ALERTS is the place for secrets",
    )
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (2)")
    parser.add_argument(
        "--idle", type=float, default=None, metavar="SECONDS", help="end with 0 when nothing came for so long"
    )
    knobs.add_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Follow the log until a critical finding, the idle time, or Ctrl-C."""
    from kl_guard import GuardConfig, KLGuard
    from kl_guard.alerts import Alerts
    from kl_guard.logs import Follower

    if options.log == "-":
        raise ValueError(
            "watch takes a file: at its end a pipe would break, and the training that writes into it with it. "
            "Let it write a file (python train.py | tee train.log), and watch that"
        )
    if not 0 < options.interval < LONGEST:
        raise ValueError(f"--interval must be a number above 0, got {options.interval}")
    alerts = Alerts(options.alert, given="--alert")
    if options.idle is not None and not options.idle >= 0:
        raise ValueError(f"--idle must be a number of at least 0, got {options.idle}")
    if Path(options.log).exists():  # said at once what is wrong with it; one that is not there may come
        if not Path(options.log).is_file():
            kind = "a folder" if Path(options.log).is_dir() else "a pipe or a device"
            raise ValueError(f"{options.log}: watch takes a file, and this is {kind}")
        Path(options.log).open("rb").close()
    guard = KLGuard(GuardConfig.build(**knobs.given(options)), announce=False, rank=0, alerts=())
    quiet_since = time.monotonic()
    command = _Command(options.on_critical, options.log)
    silence = _Silence(options.key)
    with closing(alerts), Follower(options.log) as follower, _View(options.log) as view:
        while True:
            rows = follower.poll()
            for note in follower.notes.news():
                view.note(note)
            for row in rows:
                decision = _take(guard, row, options.key, follower.notes)
                grave = [one for one in decision.findings if one.severity == "critical" or one == decision.reason]
                for finding in grave:
                    _tell(alerts, guard, finding, options, runs=command.waits)
                if grave:
                    command.start(decision.reason or grave[0])  # before anything is printed, which may block
                for finding in decision.findings:
                    view.say(finding)
                command.finish()
                if decision:
                    view.show(guard)
                    return CRITICAL
            if rows:
                quiet_since = time.monotonic()
            elif options.idle is not None and time.monotonic() - quiet_since >= options.idle:
                if hint := silence.hint(follower, rows, guard, at_end=True):
                    view.note(hint)
                return 0
            view.show(guard)
            if hint := silence.hint(follower, rows, guard):
                view.note(hint)
            time.sleep(options.interval)


def _take(guard: KLGuard, row: dict[str, Any], key: str | None, notes: Notes) -> Decision:
    """Take in a row; where steps go back, the run has been resumed."""
    from kl_guard.names import STEPS
    from kl_guard.observation import as_step

    try:
        step = next((as_step(str(row[name]).partition("/")[0]) for name in STEPS if name in row), None)
    except ValueError:
        step = None
    if step is not None and len(guard.history) and step < guard.history.steps[-1]:
        notes.add("back", f"steps go back from {guard.history.steps[-1]} to {step}, read as a resume")
        guard.resumed(max(0, step - 1))
    return guard.log(row, step, key=key)


def _tell(alerts: Alerts, guard: KLGuard, finding: Finding, options: argparse.Namespace, *, runs: bool) -> None:
    """Send an alert: the run itself goes on, as far as can be known here."""
    from kl_guard import Decision
    from kl_guard.alerts import incident_of

    next_ = "the command given for it is run" if runs else "kl-guard watch does not stop the run"
    incident = incident_of(
        Decision(findings=(finding,)),
        finding,
        step=finding.step,
        attempt=finding.attempt,
        run_id=guard.run_id,
        output_dir=None,
        done=f"It was seen in {Path(options.log).absolute()}; {next_}",
    )
    alerts.send(incident, alerts.targets(tracked=False))


class _Command:
    """The user's command for a critical finding: run once, for the first one, whatever else goes wrong."""

    def __init__(self, text: str | None, log: str) -> None:
        self._text = text
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.waits = bool(text)

    def start(self, finding: Finding) -> None:
        """Start the command, the first time."""
        if self._text is None or not self.waits:
            return
        self.waits = False
        import subprocess

        facts = {
            "SIGNATURE": finding.signature,
            "STEP": finding.step,
            "ONSET": finding.onset_step,
            "DEPARTURE": finding.departure_step,
            "LOG": self._log,
        }
        told = {f"KL_GUARD_{name}": "" if value is None else str(value) for name, value in facts.items()}
        # The user's own command as it was typed; nothing of the log is put into it.
        try:
            self._process = subprocess.Popen(self._text, shell=True, env={**os.environ, **told})  # noqa: S602
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pass  # `finish` waits for its end
        except (OSError, ValueError) as error:
            terminal.say(f"kl-guard: the command could not be run: {error}", to="stderr")

    def finish(self) -> None:
        """Wait for its end, where it was started."""
        if self._process is not None:
            with self._process as process:
                status = process.wait()
            self._process = None
            terminal.say(f"kl-guard: the command ended with {status}", to="stderr")


class _Silence:
    """Says once that nothing is seen in a log: it may be the wrong file, or its KL has a name that is not known."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._since = time.monotonic()
        self._rows = 0
        self._names: dict[str, None] = {}
        self._said = False

    def hint(self, follower: Follower, rows: list[dict[str, Any]], guard: KLGuard, *, at_end: bool = False) -> str:
        """Return what is to be said now, mostly nothing."""
        if self._said or guard.source is not None:
            return ""
        self._rows += len(rows)
        for row in rows:
            self._names.update(dict.fromkeys(list(row)[: NAMES - len(self._names)]))
        if not at_end and self._rows < ROWS and time.monotonic() - self._since < SILENCE:
            return ""
        self._said = True
        if not follower.path.is_file():
            return f"{follower.path}: the file is not there" + ("" if at_end else " yet")
        wanted = "KL" if self._key is None else repr(self._key)
        names = f"; there are: {', '.join(self._names)}" if self._names else ""
        ends = "" if follower.line else ", no line with an end"
        return f"{follower.path}: no {wanted} in {follower.line} lines{ends}, {self._rows} of them with metrics{names}"


class _View:
    """One line that is kept up to date on a terminal; elsewhere only findings are printed."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._live = sys.stdout.isatty()
        self._shown = ""

    def __enter__(self) -> _View:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._shown:
            terminal.say("")

    def say(self, finding: Finding) -> None:
        """Print a finding."""
        from kl_guard.messages import describe

        self._clear()
        terminal.say(terminal.painted(terminal.wrapped(describe(finding), "    "), str(finding.severity)))

    def note(self, text: str) -> None:
        """Print what is peculiar about the log."""
        self._clear()
        terminal.say(terminal.in_one_line(f"kl-guard: {text}"), to="stderr")

    def show(self, guard: KLGuard) -> None:
        """Bring the line up to date."""
        if not self._live:
            return
        from kl_guard.cli.curve import sparkline

        count = len(guard.history)
        if not count:
            text = f"{self._log}: waiting for a KL"
        else:
            last = guard.history[-1]
            level = {0: "calm", 1: "suspicion", 2: "critical"}.get(guard.level, "blind")
            kl = "-" if last.kl_mean is None else f"{last.kl_mean:.4g}"
            text = f"step {last.step}  KL {kl}  {level} "
            room = terminal.width() - len(text) - 1
            recent = [guard.history[i].kl_mean for i in range(max(0, count - 4 * room), count)] if room > 0 else []
            text += sparkline(recent, room, plain=terminal.plain())
        self._clear()
        self._shown = terminal.in_one_line(text)[: terminal.width() - 1]
        terminal.say(self._shown, end="")

    def _clear(self) -> None:
        if self._live and self._shown:
            terminal.say("\r" + " " * len(self._shown) + "\r", end="")
            self._shown = ""
