"""The wheel holds the core and every adapter, with their type markers, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build it once, with the tools of this environment."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(out), str(ROOT)], check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_packages(wheel):
    """Import packages at the top level, each typed."""
    names = wheel.namelist()
    packages = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert (
        {"kl_guard", "kl_guard_trl"} <= packages <= {"kl_guard", "kl_guard_trl", "kl_guard_lightning", "kl_guard_torch"}
    )
    for package in packages:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata(wheel):
    """Open ranges, the extra, the licence."""
    (name,) = [n for n in wheel.namelist() if n.endswith("METADATA")]
    text = wheel.read(name).decode()
    for line in ("Requires-Python: >=3.10", "License-Expression: Apache-2.0", "Provides-Extra: trl"):
        assert line in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not [line for line in required if "torch" in line or "==" in line]
