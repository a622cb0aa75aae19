"""The command `kl-guard`: what it prints is for people, what `--json` prints for programs."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kl_guard._version import __version__
from kl_guard.cli.terminal import USAGE, complain, in_one_line, let_go, listening, say, shown

FAULT = 70  # a bug of ours; not 1, which a script may take for a critical finding
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    That is 0, 1 for what was watched for, 2 for a usage error or what cannot be read or written, 70 for a fault of
    kl-guard itself, 130 for Ctrl-C.
    """
    _see_to_streams()
    try:
        options = _parser().parse_args(argv)
        with listening():
            status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        let_go(sys.stdout)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:  # of help, or a usage error
        return _flushed(error.code if isinstance(error.code, int) else USAGE)
    except (ValueError, TypeError, OSError, ImportError, RecursionError, OverflowError) as error:
        complain(error)
        return _flushed(USAGE)
    except Exception:
        import traceback

        say(shown(traceback.format_exc()), to="stderr", end="")
        return _flushed(FAULT)
    return status


def _see_to_streams() -> None:
    """Have streams that everything can be printed on, also where they were closed or know only ASCII."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flushed(status: int) -> int:
    """Return the status when all is printed that can be: that of a usage error where it cannot."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        let_go(sys.stdout)
    except OSError as error:
        let_go(sys.stdout)
        if status != USAGE:
            complain(error)
        return USAGE
    return status


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        say(in_one_line(f"{self.prog}: error: {message} (see {self.prog} --help)"), to="stderr")
        sys.exit(USAGE)


def _parser() -> argparse.ArgumentParser:
    """Return the parser; what a command needs is imported when it runs, so that help is there at once."""
    parser = _Parser(
        prog="kl-guard", description="A live guard against KL blow-ups in RL fine-tuning of language models."
    )
    parser.add_argument("--version", action="version", version=f"kl-guard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    from kl_guard.cli import replaying, reporting, watching

    replaying.add_to(commands)
    watching.add_to(commands)
    reporting.add_to(commands)
    return parser
