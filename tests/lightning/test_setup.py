"""Without Lightning there is one line that says what to install; with either package there is a guard."""

from __future__ import annotations

import subprocess
import sys

BOTH = "import sys; sys.modules.update({'lightning': None, 'pytorch_lightning': None})\n"


def run(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_without_lightning():
    """One line, and no other error is hidden by it."""
    result = run(BOTH + "import kl_guard_lightning")
    assert result.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: kl_guard_lightning needs Lightning, and lightning is not installed. "
        "Install it with: pip install 'kl-guard[lightning]'"
    )


def test_one_package_is_enough():
    """Whichever it is."""
    code = """
import sys
for absent, present in (("pytorch_lightning", "lightning"), ("lightning", "pytorch_lightning")):
    for name in [name for name in sys.modules if name.startswith("kl_guard_lightning")]:
        del sys.modules[name]
    sys.modules.pop(present, None)
    sys.modules[absent] = sys.modules[f"{absent}.pytorch"] = None
    from kl_guard_lightning.base import PACKAGES, Callback
    assert [package.__name__.partition(".")[0] for package in PACKAGES] == [present]
    assert issubclass(Callback, PACKAGES[0].Callback)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
