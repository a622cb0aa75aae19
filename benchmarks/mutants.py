"""Do the tests notice when the code changes? mutmut changes stats, detectors and checkpoints in small ways.

Each package is copied to a folder of its own, with its tests; mutmut changes one thing at a time in its functions and
runs the tests that reach it. A mutant is killed when a test fails, or when it never ends; survivors are printed with
what was changed. mutmut leaves alone what is outside of functions (constants) and functions with decorators other than
staticmethod and classmethod (properties).

    python benchmarks/mutants.py stats            # one package, all mutants
    python benchmarks/mutants.py --sample 30      # 30 of each module, drawn with --seed
    python benchmarks/mutants.py stats --modules windows noise
    python benchmarks/mutants.py --words          # list also survivors that only change words
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "stats": ["tests/stats", "tests/detectors", "tests/core/test_public_classes.py"],
    "detectors": ["tests/detectors", "tests/core/test_public_classes.py"],
    "checkpoints": ["tests/checkpoints", "tests/security/test_paths.py"],
}
COPIED = ("src", "integrations", "tests", "examples", "benchmarks", "docs", "README.md", "pyproject.toml")
ADDED = """

import os
import sys
from pathlib import Path

_root = Path.cwd() if Path.cwd().name == "mutants" else Path.cwd() / "mutants"
_folders = [str(_root / name) for name in ("src", "integrations", "tests", "examples", "benchmarks")]
sys.path[:0] = [folder for folder in _folders if folder not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(_folders)
"""
KILLED = frozenset({"killed", "timeout", "segfault", "suspicious"})


def main() -> None:
    """Run what is asked for and print what comes of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", choices=[*TESTS, []], help="all where none is named")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants of each module")
    parser.add_argument("--modules", nargs="+", metavar="MODULE", help="only these modules, such as windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--words", action="store_true", help="list survivors that only change words, too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, and leave it")
    options = parser.parse_args()
    for package in options.packages or TESTS:
        with tempfile.TemporaryDirectory(prefix="kl-guard-mutants-") as made:
            folder = (options.keep or Path(made)) / package
            prepare(folder, package)
            results = run(folder, options.modules, options.sample, options.seed, options.jobs)
            report(folder, package, results, options.words)


def prepare(folder: Path, package: str) -> None:
    """Copy the tree, and set mutmut and hypothesis up in the copy."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, folder / name, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, folder / name)
    settings = (folder / "pyproject.toml").read_text().replace('"--doctest-modules", ', "")
    settings += (
        f'\n[tool.mutmut]\nsource_paths = ["src"]\nonly_mutate = ["src/kl_guard/{package}/*"]\n'
        f"also_copy = {[name for name in COPIED if name != 'pyproject.toml']}\n"
        f"pytest_add_cli_args_test_selection = {TESTS[package]}\n"
        'pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak", "-k", "not killed"]\n'
    )
    (folder / "pyproject.toml").write_text(settings)
    conftest = folder / "tests" / "conftest.py"
    quick = "max_examples=20, derandomize=True, database=None"
    conftest.write_text(re.sub(r"max_examples=\d+", quick, conftest.read_text()) + ADDED)


def run(folder: Path, modules: list[str] | None, sample: int | None, seed: int, jobs: int) -> dict[str, str]:
    """Run mutmut; return how each mutant fared, by name."""
    command = [sys.executable, "-m", "mutmut"]
    names: list[str] = []
    if sample is not None or modules is not None:
        none = [*command, "run", "--max-children", str(jobs), "no.such.mutant"]  # makes the mutants, and runs none
        subprocess.run(none, cwd=folder, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        by_module: dict[str, list[str]] = {}
        for name in outcomes(command, folder):
            module = name.rpartition(".")[0]
            if modules is None or module.rpartition(".")[2] in modules:
                by_module.setdefault(module, []).append(name)
        rng = random.Random(seed)
        for module in sorted(by_module):
            these = sorted(by_module[module])
            names += these if sample is None else rng.sample(these, min(sample, len(these)))
        if not names:
            sys.exit(f"no mutants in {', '.join(modules or [])}")
    with (folder / "mutmut.log").open("w") as log:
        subprocess.run([*command, "run", "--max-children", str(jobs), *names], cwd=folder, check=False, stdout=log)
    found = outcomes(command, folder)
    if "not checked" in {found[name] for name in names or found}:
        sys.exit(f"mutmut did not finish; {folder / 'mutmut.log'} ends:\n{(folder / 'mutmut.log').read_text()[-2000:]}")
    return {name: found[name] for name in names or found}


def outcomes(command: list[str], folder: Path) -> dict[str, str]:
    """Return what mutmut knows of each mutant."""
    told = subprocess.run(
        [*command, "results", "--all", "true"], cwd=folder, check=True, capture_output=True, text=True
    )
    pairs = (line.strip().rpartition(": ") for line in told.stdout.splitlines() if "__mutmut_" in line)
    return {name: outcome for name, _, outcome in pairs}


def report(folder: Path, package: str, results: dict[str, str], words: bool) -> None:
    """Print a table of the modules and the survivors."""
    counts: dict[str, Counter[str]] = {}
    survivors: list[tuple[str, str, list[str], bool]] = []
    for name, outcome in results.items():
        module = name.rpartition(".")[0].removeprefix(f"kl_guard.{package}.")
        count = counts.setdefault(module, Counter())
        count["all"] += 1
        count["killed"] += outcome in KILLED
        if outcome not in KILLED:
            change = list(changed(folder, name))
            only_words = is_words(change)
            count["words"] += only_words
            survivors.append((name, outcome, change, only_words))
    counts[f"{package} in all"] = sum(counts.values(), Counter())
    print(f"\n| {package} | mutants | killed | % | survivors | of them words |\n|---|---|---|---|---|---|")
    for module, count in counts.items():
        left = count["all"] - count["killed"]
        share = 100 * count["killed"] / count["all"]
        print(f"| {module} | {count['all']} | {count['killed']} | {share:.1f} | {left} | {count['words']} |")
    print()
    for name, outcome, change, only_words in survivors:
        if words or not only_words:
            print(f"{name} ({outcome})", *change, sep="\n    ")


def changed(folder: Path, name: str) -> Iterator[str]:
    """Yield the lines that a mutant changes."""
    module, _, function = name.rpartition(".")
    bodies = functions(folder / "mutants" / "src" / f"{module.replace('.', '/')}.py")
    original = bodies.get(re.sub(r"__mutmut_\d+$", "__mutmut_orig", function), [])
    for line in difflib.unified_diff(original, bodies.get(function, []), lineterm="", n=0):
        if line[:1] in "+-" and line[:3] not in {"+++", "---"}:
            yield f"{line[0]} {line[1:].strip()}"


@functools.cache
def functions(path: Path) -> dict[str, list[str]]:
    """Return the lines of each function in a file but the first."""
    lines = path.read_text().splitlines()
    nodes = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef)]
    return {node.name: lines[node.lineno : node.end_lineno] for node in nodes}


def is_words(change: list[str]) -> bool:
    """Return whether only the inside of text differs: what is said, not what is done."""
    texts = [re.sub(r"f?(['\"]).*?\1", "", line[1:]) for line in change]
    return len(texts) == 2 and texts[0] == texts[1] and any(q in change[0] for q in "'\"")


if __name__ == "__main__":
    main()
