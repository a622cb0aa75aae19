"""What CI makes of known vulnerabilities; the index itself is not asked here."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / ".ci" / "audit.py"


@pytest.fixture
def audit(monkeypatch):
    spec = importlib.util.spec_from_file_location("kl_guard_audit", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    installed = {"pip-audit": "2", "filelock": "3", "numpy": "2", "kl-guard": "0", "wandb": "1"}
    rows = [type("Row", (), {"metadata": {"Name": name}, "version": one}) for name, one in installed.items()]
    monkeypatch.setattr(module.importlib.metadata, "distributions", lambda: rows)
    monkeypatch.setattr(
        module.importlib.metadata, "requires", lambda _: ["numpy>=1.26", "torch>=2.6; extra == 'torch'"]
    )
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    return module


def known(fix):
    return [{"id": "PYSEC-1", "fix_versions": fix}]


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ({}, 0, "audit: 4 packages asked for, 0 with known vulnerabilities"),
        ({"numpy": known(["2.1"])}, 1, "audit: FAILED: numpy 2: PYSEC-1, fixed in 2.1"),
        ({"numpy": known([])}, 0, "audit: note: numpy 2: PYSEC-1, fixed in none yet"),
        ({"wandb": known(["2"])}, 0, "audit: note: wandb 1: PYSEC-1, fixed in 2"),
    ],
)
def test_what_fails(audit, monkeypatch, capsys, found, status, said):
    """Only what kl-guard itself needs, and only where there is something to do."""
    monkeypatch.setattr(audit, "ask", lambda versions: (found, ""))
    assert audit.main() == status
    assert said in capsys.readouterr().out


def test_an_index_without_advisories_is_asked_once(audit, monkeypatch, capsys):
    """One question, one line, no failure."""
    asked = []

    def ask(versions):
        asked.append(versions)
        return {}, "it has none"

    monkeypatch.setattr(audit, "ask", ask)
    assert audit.main() == 0
    assert asked == [{"filelock": "3"}]
    assert capsys.readouterr().out == "audit: known vulnerabilities could not be asked for: it has none\n"


def test_names_are_compared_in_one_form(audit):
    """Whatever a requirement has behind its name."""
    names = [audit.name(one) for one in ("Foo_bar>=1", "foo.bar[x]>2; extra == 'all'", "foo-bar ; python_version>'3'")]
    assert names == ["foo-bar"] * 3
