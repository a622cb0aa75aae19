"""Where a report goes: never over what it is made from, and never half."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kl_guard import KLGuard

VALUES = [0.02] * 40 + [0.02 * 1.6**k for k in range(20)]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A log with links to it, and the folder of a run."""
    monkeypatch.chdir(tmp_path)
    lines = (json.dumps({"step": step, "kl": kl}) for step, kl in enumerate(VALUES, start=1))
    Path("run.jsonl").write_text("\n".join(lines) + "\n")
    Path("soft").symlink_to("run.jsonl")
    os.link("run.jsonl", "hard")
    guard = KLGuard(output_dir="run", announce=False, alerts=[])
    for step, kl in enumerate(VALUES, start=1):
        guard.observe(step, kl)
    guard.close()


def kl_guard(*arguments, most=None):
    """Run a command, whose files may have `most` bytes; return status and errors."""
    limit = None if most is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    command = [sys.executable, "-m", "kl_guard", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=limit)
    return done.returncode, done.stderr


def contents():
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["run.jsonl", "./run.jsonl", "soft", "hard"])
def test_a_log_is_not_overwritten(name):
    """By its own name, or through a link."""
    before = contents()
    status, errors = kl_guard("replay", "run.jsonl", "--report", name)
    assert status == 2
    assert "the report would overwrite it" in errors
    assert errors.count("\n") == 1
    assert contents() == before


@pytest.mark.parametrize("command", [["report", "run", "--output"], ["replay", "run/kl_guard", "--report"]])
def test_the_files_of_a_run_are_not_overwritten(command):
    """Journal and incident."""
    before = contents()
    incident = str(next(Path("run/kl_guard/incidents").rglob("incident.json")))
    for name in ("run/kl_guard/journal.jsonl", incident):
        status, errors = kl_guard(*command, name)
        assert (status, errors.count("\n")) == (2, 1)
        assert "the report would overwrite it" in errors
    assert contents() == before


@pytest.mark.parametrize("command", [["report", "run", "--output"], ["replay", "run.jsonl", "--report"]])
def test_a_disk_that_is_full_leaves_the_old_report(command):
    """And one line that names it; no draft stays."""
    Path("out.html").write_text("<!DOCTYPE html>old")
    before = contents()
    status, errors = kl_guard(*command, "out.html", most=4096)
    assert (status, errors) == (2, "kl-guard: error: out.html: File too large\n")
    assert contents() == before
    assert kl_guard(*command, "out.html")[0] == 0
    assert Path("out.html").stat().st_size > 4096


def test_a_link_stays_a_link():
    """The report is written to where it leads."""
    Path("page.html").symlink_to("elsewhere.html")
    assert kl_guard("replay", "run.jsonl", "--report", "page.html")[0] == 0
    assert Path("page.html").is_symlink()
    assert Path("elsewhere.html").stat().st_size > 4096
