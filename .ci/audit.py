"""What CI asks of the dependencies: that they fit together, and that none is known to be vulnerable.

The second question goes to the advisories of the package index. Where those do not answer, that is said, and nothing
fails. A known vulnerability fails the run where it is in a package that kl-guard itself asks for, extras included, and
a fixed version exists; any other one is reported.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROBE = "filelock"
SECONDS = 240


def main() -> int:
    """Check, ask, report; return the exit status."""
    status = subprocess.run([sys.executable, "-m", "pip", "check"], check=False).returncode
    installed = {name(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    installed.pop("kl-guard", None)
    why = "" if "pip-audit" in installed else "pip-audit is not installed (make setup)"
    why = why or ask({PROBE: installed[PROBE]})[1]  # one question first: an index without advisories is not asked more
    found, unknown = ({}, why) if why else ask(installed)
    if unknown:
        print(f"audit: known vulnerabilities could not be asked for: {unknown}")
        return status
    own = {name(one) for one in importlib.metadata.requires("kl-guard") or []}
    for package, vulnerabilities in found.items():
        for one in vulnerabilities:
            fails = package in own and bool(one["fix_versions"])
            status = status or int(fails)
            fix = ", ".join(one["fix_versions"]) or "none yet"
            print(
                f"audit: {'FAILED' if fails else 'note'}: {package} {installed[package]}: {one['id']}, fixed in {fix}"
            )
    print(f"audit: {len(installed)} packages asked for, {len(found)} with known vulnerabilities")
    return status


def name(requirement: str) -> str:
    """Return the name in a requirement, in the form that names are compared in."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0]).lower()


def ask(versions: dict[str, str]) -> tuple[dict[str, list[dict[str, list[str]]]], str]:
    """Return the vulnerabilities of packages that have any, and why nothing is known, "" where it is."""
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "pinned.txt"
        pinned.write_text("".join(f"{one}=={version.partition('+')[0]}\n" for one, version in versions.items()))
        command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off", "--timeout=15"]
        command += ["--vulnerability-service=pypi", "--disable-pip", "--no-deps", f"--requirement={pinned}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            told = json.loads(done.stdout)["dependencies"]
        except subprocess.TimeoutExpired:
            return {}, f"no answer within {SECONDS} seconds"
        except (ValueError, KeyError):
            return {}, (done.stderr.strip().splitlines() or ["no answer"])[-1][:300]
    answers = [one for one in told if "skip_reason" not in one]
    if not answers:
        return {}, "the package index that pip uses here has no advisories"
    return {name(one["name"]): one["vulns"] for one in answers if one["vulns"]}, ""


if __name__ == "__main__":
    sys.exit(main())
