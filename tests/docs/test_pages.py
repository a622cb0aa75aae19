"""The pages are complete, and say what the package says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields

import hooks
import pictures
import pytest
import yaml
from blocks import DOCS, PAGES, ROOT
from blocks import README as README_FILE

from kl_guard import GuardConfig, KLGuard, detectors

README = (ROOT / "README.md").read_text()
SIGNATURES = sorted({c.signature for c in vars(detectors).values() if hasattr(c, "signature")})
COMMITTED = set(pictures.PICTURES)


def page_of(signature):
    return DOCS / "signatures" / f"{signature.lower()}.md"


def nav_of(entries):
    """The files of the navigation, in order."""
    for entry in entries:
        value = entry if isinstance(entry, (str, list)) else next(iter(entry.values()))
        yield from [value] if isinstance(value, str) else nav_of(value)


@pytest.fixture(scope="module")
def nav():
    return list(nav_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def test_every_signature_has_a_page(nav):
    """In the navigation and in the table, under its own name; and there is no page of one that does not exist."""
    table = (DOCS / "signatures" / "index.md").read_text()
    for signature in SIGNATURES:
        assert page_of(signature).read_text().startswith(f"# {signature}\n")
        assert f"signatures/{signature.lower()}.md" in nav
        assert f"| [{signature}]({signature.lower()}.md) |" in table
    named = {path.stem for path in (DOCS / "signatures").glob("*.md")} - {"index"}
    assert named == {signature.lower() for signature in SIGNATURES}
    assert {d.signature for d in KLGuard()._panel.detectors} == set(SIGNATURES)


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_page_of_a_signature_has_all_its_parts(signature):
    """What is happening, what it looks like, how it is decided, what to try; and the knobs that its detector reads."""
    text = page_of(signature).read_text()
    heads = ["What is happening", "What it looks like", "How it is decided", "What to try"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == heads
    (detector,) = {c for c in vars(detectors).values() if getattr(c, "signature", None) == signature}
    tables = ", ".join(marker[1] for marker in hooks.MARKER.finditer(text) if marker[1])
    for knob in knobs_read_by(detector):
        assert knob in tables.split(", "), f"{knob} decides, and is not in the table of {page_of(signature).name}"


def knobs_read_by(detector):
    """The fields of the configuration that a detector's own file reads."""
    names = {field.name for field in fields(GuardConfig)}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[detector.__module__]))):
        if isinstance(node, ast.Attribute) and node.attr in names and "config" in ast.unparse(node.value):
            yield node.attr
        elif isinstance(node, ast.Attribute) and node.attr == "token_mean":
            yield "kl_kind"


def test_every_page_is_in_the_navigation(nav):
    """And every entry is a page."""
    assert sorted(nav) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_every_knob_has_a_row():
    """The table is made from the help texts."""
    rows = hooks.on_page_markdown((DOCS / "knobs.md").read_text())
    for field in fields(GuardConfig):
        assert f"| `{field.name}` | `{field.default!r}` | {field.metadata['help'].replace('<', '&lt;')} |" in rows


def test_a_table_of_knobs_names_only_what_there_is():
    """A marker with a wrong name is an error of the build."""
    for page in PAGES:
        hooks.on_page_markdown(page.read_text())
    with pytest.raises(ValueError, match="no knob ratios"):
        hooks.on_page_markdown("<!-- knobs: ratios -->")


@pytest.mark.parametrize("name", sorted(COMMITTED))
def test_a_picture_shows_what_the_guard_says(name):
    """Its marks are those of a replay now; the page that shows it names them, and has words for who cannot see it."""
    image = pictures.IMAGES / f"{name}.svg"
    caption = pictures.caption(name)
    assert caption in image.read_text(), f"python docs/pictures.py {name}"
    assert image.stat().st_size < 60_000
    shown = [page for page in PAGES if f"img/{name}.svg" in page.read_text()]
    assert shown
    for page in shown:
        assert caption in " ".join(page.read_text().split())
        (alt,) = re.findall(rf"!\[([^\]]*)\]\([./]*img/{name}\.svg\)", page.read_text())
        assert len(alt) > 40


def test_every_picture_is_of_a_recorded_run():
    """Each is there, small, and the page about them says how it was made."""
    runs = {path.stem for path in pictures.DATA.glob("*.csv")}
    drawn = {p.run or name for name, p in pictures.PICTURES.items()} | {p.beside for p in pictures.PICTURES.values()}
    assert drawn - {""} == runs
    text = (pictures.DATA / "README.md").read_text()
    for run in runs:
        assert (pictures.DATA / f"{run}.csv").stat().st_size < 30_000
        assert f"| `{run}.csv` |" in text
        assert f"`python docs/record.py {run}`" in text
    assert {path.stem for path in pictures.IMAGES.glob("*.svg")} == COMMITTED


def test_the_comparison_is_the_one_of_the_readme():
    """One table, measured once."""
    rows = r"^\| (?:kl-guard|rl\w+ [\d.]+|Lightning)[^|]*\|.*$"
    table = [row for row in re.findall(rows, README, re.MULTILINE) if row.count("|") == 8]
    assert len(table) == 10
    assert all(row in (DOCS / "detector.md").read_text() for row in table)


def test_the_page_about_the_report_goes_through_it():
    """Every part of the report, by its heading and in its order."""
    template = (ROOT / "src/kl_guard/report/templates/report.html").read_text()
    heads = [head.partition(" at step")[0].strip() for head in re.findall(r"<h2[^>]*>([^<{]+)", template)]
    said = re.findall(r"^\*\*([^*]+?)\.?\*\*", (DOCS / "report.md").read_text(), re.MULTILINE)
    assert [head for head in said if head in heads] == heads


@pytest.mark.parametrize("adapter", ["trl", "lightning"])
def test_what_a_rollback_may_change_is_there(adapter):
    """Names of the context that pages and README use are those of the adapter that they are about."""
    context = importlib.import_module(f"kl_guard_{adapter}").RollbackContext
    known = {field.name for field in fields(context)} | set(dir(context))
    used = set()
    for page in (README_FILE, *PAGES):
        part = page.read_text()
        if page == README_FILE:
            part = part.split("## Use it with Lightning")[adapter == "lightning"].split("\n## Use it in a loop")[0]
        elif (adapter == "lightning") != (page.stem == "lightning"):
            continue
        used |= set(re.findall(r"\bcontext\.(\w+)", part))
    assert "new_noise" in used
    assert used <= known


def test_links_of_the_readme_lead_somewhere():
    """To files, and to headings in them."""
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads], link


def test_cases_are_named_by_repository_and_number():
    """Each answer of the FAQ stands on a case, or on a promise that is tested."""
    text = (DOCS / "faq.md").read_text()
    answers = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(answers) > 30
    for answer in answers:
        question, _, rest = answer.partition("\n")
        assert question.endswith(("?", ".")), question
        assert re.search(r"[A-Za-z0-9][\w.-]+ \d{1,5}\b", rest), question


def test_the_site_builds_and_asks_for_nothing_from_elsewhere(tmp_path):
    """Strictly, without a network: no fonts, scripts or styles of others."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//", text), page.name
    assert "GuardConfig" in (tmp_path / "api" / "index.html").read_text()
