"""The overhead report in a real browser: loads nothing, fits any width, reads well in the dark and without eyes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from reports.overhead.html import overhead_html

pytestmark = pytest.mark.browser

CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def overhead_file(root: Path, tmp_path_factory) -> Path:
    study = runpy.run_path(str(root / "tests" / "reports" / "overhead" / "conftest.py"))["a_study"]()
    path = tmp_path_factory.mktemp("overhead") / "report.html"
    path.write_text(overhead_html(study), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, overhead_file):
    """`opened(**options)`: the page. That it complained, or asked for anything but itself, is a failure."""
    contexts, complaints = [], []

    def open_(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(overhead_file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == [overhead_file.as_uri()] * len(contexts)


def ask(page, check: str, *arguments):
    return page.evaluate(
        f"([check, ...rest]) => ({CHECKS.strip().removesuffix(';')})[check](...rest)", [check, *arguments]
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_told_from_what_is_behind_it(opened, scheme):
    page = opened(color_scheme=scheme)
    assert page.locator("svg").count() == 8
    assert ask(page, "lowContrast", 4.5) == []
    assert len(ask(page, "lowContrast", 21.1)) > 50


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_fits_its_window(opened, width):
    page = opened(viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert ask(page, "beyondTheWindow") == []


def test_everything_can_be_reached_and_has_a_name(opened):
    assert ask(opened(), "hardToReach") == []


def test_the_pictures_lie_within_themselves(opened):
    """No label of a picture runs out of it."""
    outside = opened().evaluate(
        """() => [...document.querySelectorAll("svg text")].filter((text) => {
            const own = text.getBoundingClientRect(), all = text.closest("svg").getBoundingClientRect();
            return own.left < all.left - 1 || own.right > all.right + 1 || own.bottom > all.bottom + 1;
        }).map((text) => text.textContent)"""
    )
    assert outside == []
