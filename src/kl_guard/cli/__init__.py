"""The command `kl-guard`: what it prints is for people, what `--json` prints for programs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kl_guard._version import __version__

USAGE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 for what was watched for, 2 for a usage error, 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        from kl_guard.cli.terminal import listening

        with listening():
            status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"kl-guard: error: {_one_line(error)}", file=sys.stderr)
        return USAGE
    return status


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
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


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or repr(error)
