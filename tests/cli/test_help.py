"""Help is there at once, and the package costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kl_guard

HEAVY = ("numpy", "scipy", "rich", "jinja2", "torch", "sortedcontainers", "kl_guard.detectors", "kl_guard.guard")


def loaded_after(code):
    """Return which of the heavy modules a fresh process has imported."""
    seen = f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    return run.stderr.split("\n")[-2].split()


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["replay", "--help"], 0),
        (["watch", "--help"], 0),
        (["replay"], 2),
        (["nonsense"], 2),
    ],
)
def test_help_imports_nothing_heavy(arguments, status):
    """Nor does a usage error; that is what made it slow."""
    assert loaded_after(f"from kl_guard.cli import main\nassert main({arguments}) == {status}") == []


def test_importing_the_package_imports_nothing_heavy():
    """The public names come when they are used."""
    assert loaded_after("import kl_guard") == []
    assert "numpy" in loaded_after("from kl_guard import KLGuard")


def test_every_public_name_is_there():
    """By attribute, by star, in dir; the function `replay` is never the module of a like name."""
    found = {}
    exec("from kl_guard import *", found)  # noqa: S102
    assert set(kl_guard.__all__) <= set(found)
    assert set(kl_guard.__all__) <= set(dir(kl_guard))
    assert callable(kl_guard.replay)
    code = (
        "import kl_guard.cli.answer, kl_guard\nassert callable(kl_guard.replay) and kl_guard.replay([0.1]).observations"
    )
    loaded_after(code)


def test_a_name_that_is_not_there():
    """Is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="module 'kl_guard' has no attribute 'KLGard'"):
        _ = kl_guard.KLGard
