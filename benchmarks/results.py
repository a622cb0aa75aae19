"""Run every benchmark and write what they print, with machine, versions and date, into `benchmarks/RESULTS.md`.

    python benchmarks/results.py [--series FOLDER] [--only NAME ...]

Each benchmark is a process of its own, one after the other; leave the machine alone meanwhile. A benchmark whose limits
are not kept says so and makes this command return 1. `--only` leaves the other sections of the file as they are.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
DISTRIBUTIONS = (
    "kl-guard",
    "numpy",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "lightning",
    "sortedcontainers",
    "rich",
)


@dataclass(frozen=True)
class Section:
    """One benchmark: its script, its heading, what it is about, and whether it prints Markdown."""

    name: str
    title: str
    about: str
    markdown: bool = False


SECTIONS = (
    Section(
        "detection",
        "Detection beside the peers",
        "Blow-ups caught and healthy runs halted, on recorded series, one observation after the other. The peers keep "
        "their defaults; Lightning's `EarlyStopping` has none and is shown with three limits.",
        markdown=True,
    ),
    Section(
        "false_alarms",
        "False alarms and delays on simulated runs",
        "Thousands of runs, healthy ones and blow-ups, drawn with the noise of recorded series.",
        markdown=True,
    ),
    Section("cost", "Cost of an observation", "Against the length of the run, journal included.", markdown=True),
    Section("overhead", "Cost of the guard in a real run", "GRPO on the CPU with and without the guard, in turn."),
    Section("pins", "Cost of a pin", "Against a plain copy of the checkpoint."),
    Section("tokens", "Cost of summing up a batch's tokens", "Against the bare arithmetic of it."),
    Section("replay", "Replay of long logs", "Each measurement is a process of its own."),
)


def main() -> int:
    """Write the file; return 1 when a benchmark's limits are not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=Path, help="folder of labelled series; the project's own where none is given")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], help="run these only")
    options = parser.parse_args()
    if options.series is not None and not (options.series / "labels.csv").is_file():
        parser.error(f"--series: {options.series} holds no labels.csv")
    texts = sections_of(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    failed = []
    for section in SECTIONS:
        if options.only and section.name not in options.only:
            continue
        print(f"{section.name} ...", flush=True)
        arguments = [str(options.series)] if section.name == "detection" and options.series else []
        run = subprocess.run(
            [sys.executable, str(HERE / f"{section.name}.py"), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        failed += [section.name] if run.returncode else []
        texts[section.title] = shown(section, arguments, run.stdout, run.returncode)
        RESULTS.write_text(page(texts), encoding="utf-8")
    print(f"written: {RESULTS}" + (f"; limits not kept: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def shown(section: Section, arguments: Sequence[str], output: str, status: int) -> str:
    """Return a section of the file."""
    folder = " ".join(Path(argument).name for argument in arguments)
    command = f"python benchmarks/{section.name}.py {folder}".strip()
    when = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%d")
    body = output.strip() if section.markdown else f"```text\n{output.strip()}\n```"
    verdict = "" if status == 0 else f"\n\nThe limits were not kept (status {status})."
    return f"{section.about} `{command}`, {when}.\n\n{body}{verdict}"


def page(texts: dict[str, str]) -> str:
    """Return the whole file."""
    versions = ", ".join(f"{name} {version}" for name in DISTRIBUTIONS if (version := _version(name)))
    lines = [
        "# What was measured",
        "",
        "Written by `make bench`; each ratio is from one run, both sides in turn. Times are this machine's.",
        "",
        f"Machine: {_machine()}. Python {platform.python_version()}, {versions}.",
    ]
    for section in SECTIONS:
        if section.title in texts:
            lines += ["", f"## {section.title}", "", texts[section.title]]
    return "\n".join(lines) + "\n"


def sections_of(text: str) -> dict[str, str]:
    """Return the sections that the file has, by heading."""
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    return {title: body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> str:
    model = platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        names = re.findall(r"^model name\s*:\s*(.*)$", cpu.read_text(encoding="utf-8"), flags=re.MULTILINE)
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, {platform.system()} {platform.release()}"


if __name__ == "__main__":
    sys.exit(main())
