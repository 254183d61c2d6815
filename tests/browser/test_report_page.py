"""report.html in a real browser: loads nothing, works with a keyboard, reads well at any width and in the dark."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from reports.html import report_html
from scenarios.words import Policy, Result

pytestmark = pytest.mark.browser

CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
SCHEMES = ("light", "dark")
SHOWN = "article.cell:not([hidden])"
MOST_TABS = 30


@contextmanager
def opened(browser, file: Path, hash_: str = "", **options):
    """The page in a browser of its own. That it complained, or asked for anything but itself, is a failure."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on(
        "request", lambda request: None if request.url.startswith(file.as_uri()) else complaints.append(request.url)
    )
    page.goto(file.as_uri() + hash_)
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def page(browser, page_file):
    with opened(browser, page_file) as page:
        yield page


def ask(page, check: str, *arguments):
    return page.evaluate(
        f"([check, ...rest]) => ({CHECKS.strip().removesuffix(';')})[check](...rest)", [check, *arguments]
    )


def tab_to(page, selector: str) -> None:
    """Press Tab until this has the focus."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def hash_of(page) -> str:
    return page.evaluate("location.hash")


def shown(page) -> Counter[str]:
    """The results of the cells that are shown."""
    return Counter(page.locator(SHOWN).evaluate_all("cells => cells.map(cell => cell.dataset.result)"))


def test_the_page_opens_without_a_complaint_and_asks_for_nothing(page, run):
    assert page.locator("article.cell").count() == len(run.cells)
    assert page.title() == "FAILED: kvchaos smoke"


def test_the_page_forbids_what_it_does_not_bring(page_file, browser, tmp_path):
    """What could be slipped into the page neither loads nor runs."""
    slipped = (
        '<img src="http://127.0.0.1:9/x"><script>window.ran = 1</script><b onclick="window.ran = 2" id="b">b</b></main>'
    )
    file = tmp_path / "slipped.html"
    file.write_text(page_file.read_text(encoding="utf-8").replace("</main>", slipped), encoding="utf-8")
    context = browser.new_context()
    page = context.new_page()
    sent = []
    page.on("requestfinished", lambda request: sent.append(request.url))
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(file.as_uri())
    page.locator("#b").click()
    assert page.evaluate("window.ran") is None
    assert sent == [file.as_uri()]
    assert sum("Content Security Policy" in text for text in refused) >= 3
    context.close()


def test_hostile_names_stay_text(browser, run, tmp_path):
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'>"
    cells = tuple(replace(cell, scenario=nasty, faults=(nasty,), topology=nasty, rerun=nasty) for cell in run.cells[:3])
    file = tmp_path / "hostile.html"
    file.write_text(report_html(replace(run, name=nasty, cells=cells)), encoding="utf-8")
    with opened(browser, file, "#text=%3Cscript%3E&fault=%22%3E%3Cscript%3E&policy=nosuch") as page:
        assert page.locator(SHOWN).count() == 3
        assert page.locator("script").count() == 1


def test_filters_work_with_the_keyboard_alone(page, run):
    tab_to(page, "[name=result]")
    page.keyboard.type("fail")
    assert shown(page) == {"fail": 1}
    assert hash_of(page) == "#result=fail"
    assert page.locator(".shown").inner_text() == f"1 of {len(run.cells)} cells"
    assert page.locator("#filter").get_attribute("class") == "filter active"
    page.keyboard.press("Home")
    assert sum(shown(page).values()) == len(run.cells)

    tab_to(page, "[name=policy]")
    page.keyboard.type("off")
    assert sum(shown(page).values()) == sum(cell.policy is Policy.OFF for cell in run.cells)
    tab_to(page, "[name=text]")
    page.keyboard.type("short-TRANSFER twin")
    assert page.locator(SHOWN).evaluate_all("cells => cells.map(cell => cell.dataset.policy)") == ["off"] * 2
    assert hash_of(page) == "#policy=off&text=short-TRANSFER+twin"
    assert page.locator(".matrix tbody tr:not(.group):visible").count() == 2
    assert page.locator(".matrix .badge:visible").count() == 2

    tab_to(page, "[name=clear]")
    page.keyboard.press("Enter")
    assert sum(shown(page).values()) == len(run.cells)
    assert hash_of(page) == ""
    assert page.evaluate("document.activeElement.name") == "text"


def test_nothing_left_to_show_is_said(page, run):
    page.locator("[name=text]").fill("no such words anywhere")
    assert page.locator(SHOWN).count() == 0
    assert page.locator(".shown").inner_text() == f"none of {len(run.cells)} cells"
    assert page.locator(".matrix:visible").count() == 0
    assert page.locator("section.scenario:visible").count() == 0


def test_the_address_holds_the_filters(browser, page_file):
    with opened(browser, page_file, "#result=known_gap&fault=bit_flip") as page:
        assert set(shown(page)) == {"known_gap"}
        assert page.locator("[name=fault]").input_value() == "bit_flip"
        page.locator(".matrix a.badge:visible").first.click()
        assert hash_of(page).startswith("#cell-")
        assert set(shown(page)) == {"known_gap"}
        page.go_back()
        assert hash_of(page) == "#result=known_gap&fault=bit_flip"
        page.evaluate("location.hash = 'result=fail'")
        page.wait_for_function("document.querySelector('[name=result]').value === 'fail'")
        assert shown(page) == {"fail": 1}
        page.reload()
        assert shown(page) == {"fail": 1}


def test_a_link_to_a_hidden_cell_shows_it(browser, page_file, run):
    with opened(browser, page_file, "#result=fail") as page:
        failed = page.locator(SHOWN)
        failed.get_by_role("link", name="clean twin").click()
        page.wait_for_function("!document.querySelector('article.cell[hidden]')")
        twin = page.locator("article.cell:target")
        assert twin.count() == 1
        page.wait_for_function(
            "document.querySelector('article.cell:target').getBoundingClientRect().top < innerHeight"
        )
        assert page.locator(SHOWN).count() == len(run.cells)


def test_every_link_leads_to_a_place(page):
    links = page.locator("a[href]").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert links
    assert all(link.startswith("#") for link in links)
    assert page.evaluate("links => links.filter(link => !document.getElementById(link.slice(1)))", links) == []


def test_a_link_of_the_table_brings_its_cell_below_the_filters(page):
    for number in (0, 9, 30):
        page.evaluate("scrollTo(0, 0)")
        page.locator("#filter ~ section .matrix a.badge").nth(number).click()
        page.wait_for_function(
            """() => {
                const top = document.querySelector("article.cell:target").getBoundingClientRect().top;
                return top >= document.querySelector("#filter").getBoundingClientRect().bottom && top < innerHeight / 2;
            }"""
        )


def test_details_open_with_the_keyboard(page):
    summary = page.locator(f"{SHOWN} summary").first
    table = page.locator(f"{SHOWN} details table.events").first
    summary.scroll_into_view_if_needed()
    assert not table.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert table.is_visible()
    assert table.locator("tbody tr").count() > 5


def test_a_cell_that_needs_a_person_is_open(page):
    opened_by = page.locator("details[open]").evaluate_all("all => all.map(el => el.closest('article').dataset.result)")
    assert set(opened_by) == {"fail", "unknown"}


def test_the_rerun_command_can_be_copied(browser, page_file, run):
    with opened(browser, page_file, permissions=["clipboard-read", "clipboard-write"]) as page:
        line = page.locator("article[data-result=fail] .rerun")
        line.get_by_role("button").focus()
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('article[data-result=fail] .said').textContent === 'copied'")
        (failed,) = [cell for cell in run.cells if cell.result is Result.FAIL]
        assert page.evaluate("navigator.clipboard.readText()") == failed.rerun
        assert line.locator("code").inner_text() == failed.rerun


def test_without_scripts_everything_is_there(browser, page_file, run):
    with opened(browser, page_file, java_script_enabled=False) as page:
        assert page.locator(SHOWN).count() == len(run.cells)
        assert not page.locator("#filter").is_visible()
        assert page.locator(".rerun button").count() == 0
        page.locator("summary").first.click()
        assert page.locator("details.legend, .untested details").first.is_visible()
        assert page.locator(".untested dl").first.is_visible()


@pytest.mark.parametrize("width", [360, 420, 768, 1280, 1920])
def test_the_page_fits_its_window(browser, page_file, width):
    with opened(browser, page_file, viewport={"width": width, "height": 800}) as page:
        page.evaluate("document.querySelectorAll('details').forEach(el => el.open = true)")
        page.evaluate("document.querySelectorAll('.cell').forEach(el => el.style.contentVisibility = 'visible')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert ask(page, "beyondTheWindow") == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [420, 1280])
def test_text_can_be_told_from_what_is_behind_it(browser, page_file, scheme, width):
    with opened(browser, page_file, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        page.evaluate("document.querySelectorAll('details').forEach(el => el.open = true)")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 23)"
        assert dark == (scheme == "dark")
        assert ask(page, "lowContrast", 4.5) == []
        # The check itself must be able to fail.
        assert len(ask(page, "lowContrast", 21.1)) > 100


def test_everything_can_be_reached_and_has_a_name(page):
    page.evaluate("document.querySelectorAll('details').forEach(el => el.open = true)")
    assert ask(page, "hardToReach") == []
    page.evaluate(
        "document.querySelector('caption').remove(); document.querySelectorAll('h3').forEach(el => el.remove())"
    )
    assert len(ask(page, "hardToReach")) >= 2


def test_nothing_moves_for_who_does_not_want_it(browser, page_file):
    with opened(browser, page_file, reduced_motion="reduce") as page:
        assert ask(page, "moving") == 0


def test_on_paper_the_controls_are_gone(page):
    page.emulate_media(media="print")
    assert not page.locator("#filter").is_visible()
    assert page.locator(".rerun button:visible").count() == 0
    assert page.locator("table.events").first.is_visible()
