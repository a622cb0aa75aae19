"""The report in a real browser: wide, narrow and dark; pictures of it are left in `browser-output/`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from stories import HOSTILE, run_into_trouble

from kl_guard import Checkpoint, GuardConfig, KLGuard
from kl_guard.history import History
from kl_guard.incidents import Tokens
from kl_guard.observation import Observation
from kl_guard.report import Story, render, story_of
from kl_guard.token_stats import Excerpt, Outlier

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "browser-output"
AXE = ROOT / ".axe" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIEWS = {
    "desktop": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 375, "height": 812}, "color_scheme": "light", "device_scale_factor": 2},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "dark phone": {"viewport": {"width": 320, "height": 640}, "color_scheme": "dark"},
}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `make test` installs Debian's where it can")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def halted(folder):
    run_into_trouble(folder)
    return story_of(folder / "kl_guard")


def gone_back(folder):
    guard = run_into_trouble(folder, action="rollback")
    target = guard.go_back()
    guard.rolled_back(target.step)
    for step in range(target.step + 1, target.step + 30):
        guard.observe(step, 0.02 + 0.001 * (step % 3), kl_max=0.4, reward=0.01 * step, learning_rate=5e-7, beta=0.08)
    guard.close()
    return story_of(folder / "kl_guard")


def hostile(folder):
    """A run with everything that may stand in a token, a log or a path."""
    history = History()
    for step in range(1, 60):
        history.append(Observation(step, kl_mean=0.02 * 1.2**step, kl_max=2.0 * 1.2**step, reward=0.1 * step))
    outliers = tuple(Outlier(10.0**i, -9.0, -0.5, 7, 3 + i, 0, text=t, prompt=t) for i, t in enumerate(HOSTILE))
    heats = (0.0, 0.5, 5.0, 50.0, 500.0, None, math.nan, math.inf)
    excerpt = Excerpt(0, 3, tuple(range(len(HOSTILE))), heats, tuple(HOSTILE))
    plain = Excerpt(
        1, 0, tuple(range(64)), tuple(float(i % 7) for i in range(64)), tuple(f" word{i}" for i in range(64))
    )
    return Story(
        title=HOSTILE[0],
        history=history,
        findings=(),
        tokens=Tokens(59, outliers, (excerpt, plain)),
        checkpoints=[Checkpoint(i, text) for i, text in enumerate(HOSTILE)],
        config={text: text for text in HOSTILE},
        notes=HOSTILE,
    )


def long(folder):
    """100,000 steps, all that can be drawn."""
    guard = KLGuard(GuardConfig(), announce=False)
    history = History()
    for step in range(1, 100_001):
        wave = math.sin(step / 500)
        history.append(
            Observation(
                step,
                kl_mean=0.05 + 0.02 * wave,
                kl_max=3 + wave,
                reward=wave,
                entropy=1 + 0.1 * wave,
                grad_norm=1.5 + wave,
                learning_rate=1e-6,
                beta=0.04,
            )
        )
    return Story("run", history, guard.findings)


def empty(folder):
    return Story("run", History(), ())


@pytest.fixture(scope="module", params=[halted, gone_back, hostile, long, empty], ids=lambda make: make.__name__)
def page_file(request, tmp_path_factory):
    """A report on disk, opened as a person would: name and path."""
    folder = tmp_path_factory.mktemp(request.param.__name__)
    path = folder / "report.html"
    path.write_text(render(request.param(folder)), encoding="utf-8")
    return request.param.__name__, path


@pytest.fixture(scope="module", params=VIEWS)
def opened(request, browser, page_file):
    """The report in one view, and what the browser had to say about it: page, complaints, what it asked for."""
    name, path = page_file
    context = browser.new_context(**VIEWS[request.param])
    page = context.new_page()
    complaints, asked = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda sent: asked.append(sent.url))
    page.goto(path.as_uri())
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}, {request.param}.png", full_page=True)
    yield page, complaints, asked
    context.close()


OVERFLOWING = """() => [...document.querySelectorAll('body *')].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && !element.closest('svg') && (box.right > innerWidth + 1 || box.left < -1)
        && getComputedStyle(element).clipPath === 'none' && !element.closest('thead');
}).map(element => element.outerHTML.slice(0, 120))"""


def test_it_fits_asks_for_nothing_and_runs_nothing(opened):
    """No overflow, not a word on the console, no request but the file itself."""
    page, complaints, asked = opened
    assert complaints == []
    assert asked == [page.url]
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate("document.scripts.length + document.images.length + document.styleSheets.length") == 1
    assert page.title().startswith("kl-guard: ")


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core: `make test` installs it where npm can")
def test_axe_finds_nothing_serious(opened):
    """Contrast, names, structure: for all who read it otherwise."""
    page, _, _ = opened
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [(v["id"], v["impact"], [n["target"] for n in v["nodes"]][:3]) for v in found] == []


@pytest.mark.parametrize("view", ["desktop", "dark"])
def test_on_paper_everything_is_there(browser, tmp_path, view):
    """Details are open in print; the paper is white."""
    path = tmp_path / "report.html"
    path.write_text(render(halted(tmp_path)), encoding="utf-8")
    page = browser.new_context(**VIEWS[view]).new_page()
    page.goto(path.as_uri())
    page.emulate_media(media="print")
    assert page.get_by_text("outlier_top_k").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    (PICTURES / f"print, {view}.pdf").write_bytes(page.pdf())
    page.context.close()
