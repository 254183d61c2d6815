"""A real browser for the pages that kvchaos writes. Only for who asks: `make test-browser`, or `pytest -m browser`.

Whoever asks and has no browser is told so by a failure: a skip would look like a page that works.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
from pathlib import Path

import pytest

from reports.html import report_html

MARKER = "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome")
NO_PLAYWRIGHT = "the browser tests need playwright: `make test-browser` installs it, or `pip install playwright`"
NO_CHROMIUM = (
    f"the browser tests need Chromium, and none of {', '.join(NAMES)} is on PATH: `make test-browser` installs it "
    "where it may, else install your system's package"
)


def pytest_configure(config):
    config.addinivalue_line("markers", f"{MARKER}: needs playwright and Chromium; run by `make test-browser`")


def pytest_collection_modifyitems(config, items):
    """Leave these tests out unless `-m` asks for them."""
    if MARKER in (config.option.markexpr or ""):
        return
    left = [item for item in items if item.get_closest_marker(MARKER)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def browser():
    """Chromium, headless."""
    sync_playwright = None
    with contextlib.suppress(ImportError):
        from playwright.sync_api import sync_playwright
    if sync_playwright is None:
        pytest.fail(NO_PLAYWRIGHT, pytrace=False)
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail(NO_CHROMIUM, pytrace=False)
    # Chromium's sandbox does not work for root, as whom containers often run.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=arguments)
        yield found
        found.close()


@pytest.fixture(scope="session")
def run(root: Path):
    """A run with everything in it: the one by hand of tests/reports."""
    return runpy.run_path(str(root / "tests" / "reports" / "conftest.py"))["troubled_run"]()


@pytest.fixture(scope="session")
def page_file(run, tmp_path_factory) -> Path:
    """Its report.html."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_html(run), encoding="utf-8")
    return path
