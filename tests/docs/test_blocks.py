"""What the documentation shows is what happens: its code runs, its commands print what it says."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import given
import pytest
from blocks import PAGES, README, ROOT, RUN, blocks_of, commands_of, fits, name_of

ALL = [README, *PAGES]

pytestmark = [
    pytest.mark.filterwarnings("default"),  # what frameworks warn of is theirs
    pytest.mark.usefixtures("_in_a_folder"),
]


def pages_with(language):
    """Pages that have a block of a language."""
    pages = [page for page in ALL if any(block.language == language for block in blocks_of(page))]
    return pytest.mark.parametrize("page", pages, ids=name_of)


@pytest.fixture
def _in_a_folder(tmp_path, monkeypatch):
    """An empty folder, in which the checkout's docs and examples are at hand; what a script was called with."""
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(
        sys, "argv", ["train.py", *["--output_dir", "run", "--ratio", "4", "--use_cpu", "true", "--bf16", "false"]]
    )


@pages_with("python")
def test_code_runs(page, caplog, capsys):
    """Each block as it stands, the blocks of a page in turn; prompts give what is shown."""
    names = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.marker == "given" and block.language == "python":
            names |= getattr(given, block.argument)()
        if block.marker == "prints":
            assert any(fits(block.text, record) for record in logged(caplog)), (block.text, logged(caplog))
        if block.language != "python":
            continue
        caplog.clear()
        if ">>>" in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, names, name_of(page), str(page), block.line)
            assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0, capsys.readouterr().out
            names |= test.globs
            continue
        before = set(names)
        exec(compile("\n" * block.line + block.text, name_of(page), "exec"), names)  # noqa: S102 - our own documentation
        if block.marker == "method":
            for name in set(names) - before:
                if inspect.isfunction(names[name]):
                    setattr(type(names[block.argument]), name, names[name])


def logged(caplog):
    """What the guard has logged, as a handler shows it."""
    return [record.getMessage() for record in caplog.records if record.name == "kl_guard"]


@pages_with("console")
def test_commands_print_what_is_shown(page):
    """Each `$ command`, in a shell, on a terminal of 100 columns."""
    for block in blocks_of(page):
        for command, shown in commands_of(block) if block.language == "console" else ():
            run = shell(command)
            assert fits(shown, run.stdout), f"{name_of(page)}: $ {command}\n{run.stdout}\nis not\n{shown}"


def test_the_commands_of_the_readme_run():
    """Each line, in a folder that has what it names."""
    (block,) = [block for block in blocks_of(README) if block.language == "bash" and block.marker == "given"]
    getattr(given, block.argument)()
    lines = block.text.splitlines()
    assert len(lines) > 4
    for line in lines:
        run = shell(line)
        assert run.returncode == (1 if " watch " in line else 0), f"$ {line}\n{run.stdout}"
    assert Path("out.html").is_file()
    assert Path("stopped").read_text() == "4711\n"


def shell(command):
    """Run a command as a reader would; return its status and what it has printed."""
    paths = [str(Path("bin").absolute()), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(paths), "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "integrations")])}
    return subprocess.run(
        ["bash", "-c", command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_every_block_is_of_a_kind_that_is_known(page):
    """Python and console blocks are run; bash is for what installs, text for what a run has logged."""
    for block in blocks_of(page):
        assert block.language in (*RUN, "bash", "text"), f"{name_of(page)}, line {block.line}"
        if block.language == "bash" and not block.marker:
            assert re.match(r"(pip install|make) ", block.text), f"{name_of(page)}, line {block.line}: run it instead"
        assert block.marker != "given" or hasattr(given, block.argument)
    assert page.read_text().count("\n```") == 2 * len(blocks_of(page)), "a block was not understood"
