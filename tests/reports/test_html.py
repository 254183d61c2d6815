"""report.html is one well-formed file that loads nothing, links only into itself, and shows hostile text as text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from reports import html
from reports.html import report_html
from reports.results import TimelineEvent
from reports.summary import headline_lines
from scenarios.words import Policy, Result, Role

VOID = {"meta", "br", "link", "img", "input", "hr"}
LOADING = {"link", "img", "image", "iframe", "object", "embed", "audio", "video", "source", "use", "base", "form"}


class Page(HTMLParser):
    """What a browser would make of the page, as far as these tests ask."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.links, self.attributes = [], Counter(), Counter(), [], []
        self.text, self.headings, self.raw = [], [], {"style": [], "script": []}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        known = dict(attrs)
        assert len(known) == len(attrs)
        if "id" in known:
            self.ids[known["id"]] += 1
        if tag == "a":
            self.links.append(known["href"])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag in ("td", "th"):
            self.text.append(" ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]].append(data)
        elif self.open:
            self.text.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())


def content_policy(page):
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and "script-src" in (value or "")]
    return policy


@pytest.fixture
def page(troubled):
    return Page(report_html(troubled))


def test_links_lead_into_the_page_and_places_are_unique(page):
    assert all(link.startswith("#") for link in page.links)
    assert not {link[1:] for link in page.links} - set(page.ids)
    assert set(page.ids.values()) == {1}
    named = [value for _, name, value in page.attributes if name in ("aria-labelledby", "for")]
    assert not set(named) - set(page.ids)


def test_nothing_is_loaded_from_anywhere(troubled, page):
    text = report_html(troubled)
    assert not LOADING & set(page.tags)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|src=|srcset", text)
    (policy,) = [
        value for tag, name, value in page.attributes if tag == "meta" and (value or "").startswith("default-src")
    ]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_only_the_one_script_and_style_of_the_page_may_run(page):
    """The policy knows them by digest, so an attribute or an element that something slipped in does nothing."""
    policy = content_policy(page)
    for tag in ("style", "script"):
        assert page.tags[tag] == len(page.raw[tag]) == 1
        digest = base64.b64encode(hashlib.sha256(page.raw[tag][0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not [name for _, name, _ in page.attributes if name == "style" or name.startswith("on")]


def test_every_cell_has_a_section_and_a_link_from_its_table(troubled, page):
    assert page.tags["article"] == len(troubled.cells)
    into_cells = {link for link in page.links if link.startswith("#cell-")}
    assert len(into_cells) == len(troubled.cells)


def test_tables_and_headings_can_be_walked(page):
    assert page.tags["caption"] == page.tags["table"]
    assert all(name == "scope" for tag, name, _ in page.attributes if tag == "th" and name != "colspan")
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    assert page.links[0] == "#main"


def test_what_is_said_in_the_page(troubled, page):
    for line in headline_lines(troubled):
        assert line in page.words
    for part in (
        "✗ FAILED",
        "Got 104 101 108 108 111 0 (first difference) 7",
        "Load 2: got 16 tokens, wanted 16; 2 differ, the first at position 5, counted from 0.",
        "served expected recomputed",
        "target sim has no lever Network",
        "violation: unexplained_verified",
        "none: nothing proves that the fault happened",
        "compared and equal: 0-2, 4-12",
        "corrupted and not seen: 3",
        "Diagnosis of load 2 layer 0, head 1, tokens 48 to 63 What would explain it, best first: a write hit one block",
        "85 fault req-2 bit_flip: block 3, layer 0, head 1",
        "Not tested: ",
    ):
        assert part in page.words


def test_hostile_text_stays_text(build):
    nasty = "</style></script><script>alert(1)</script><img src=x onerror=y> \" ' ` {{ 7*7 }} \x00\x1b\u202e\ud800"
    load = replace(build.load(2, faulted=True, corrupted=True), request_id=nasty, reason=nasty, error=nasty)
    touched = replace(build.cell().evidence[0], fault=nasty, seam=nasty, what=nasty, before=nasty, after=nasty)
    cell = build.cell(
        nasty, result=Result.FAIL, loads=(load,), why=(nasty,), topology=nasty, faults=(nasty,), known_gap=nasty
    )
    cell = replace(cell, evidence=(touched,), rerun=nasty, incidents=(nasty,), violations=(nasty,), twin=nasty)
    told = tuple(
        TimelineEvent(t, where, nasty, nasty, nasty) for t, where in enumerate(("fault", "proxy", "run", nasty))
    )
    hurt = replace(load, request_id="other", damage=nasty, diagnosis=(nasty, nasty))
    cell = replace(cell, loads=(load, hurt), timeline=told)
    text = report_html(replace(build.run(cell, replace(cell, seed=8)), name=nasty, target=nasty))
    page = Page(text)
    assert not LOADING & set(page.tags)
    assert page.tags["script"] == page.tags["style"] == 1
    assert "<script>alert(1)</script>" in page.words
    assert not set(text) & set("\x00\x1b\u202e\ud800")
    assert text.encode("utf-8")


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_without_cells_is_shown_as_no_pass(build, interrupted):
    text = report_html(build.run(interrupted=interrupted))
    page = Page(text)
    assert "PASSED" not in text
    assert f"? {'INTERRUPTED' if interrupted else 'EMPTY'}" in page.words
    assert page.tags["table"] == 0


def test_an_unknown_cell_never_looks_like_a_pass(build):
    loads = build.clean_loads(Policy.FAIL_CLOSED_FAIL)
    cell = build.cell(policy=Policy.FAIL_CLOSED_FAIL, result=Result.UNKNOWN, loads=loads, evidence=())
    page = Page(report_html(build.run(cell)))
    classes = [value for tag, name, value in page.attributes if name == "class" and "r-pass" in (value or "")]
    assert classes == ["r-pass zero"]
    assert "✓ 0 pass" in page.words
    assert page.words.count("? unknown") >= 3


def test_cells_that_share_a_place_are_all_linked_from_it(build):
    cells = [build.cell(seed=i, result=Result.FAIL if i == 3 else Result.PASS) for i in range(html.MAX_LINKS + 2)]
    page = Page(report_html(build.run(*cells)))
    assert "FAIL 1 of 8" in page.words
    assert "and 2 more below" in page.words
    assert not {link[1:] for link in page.links} - set(page.ids)


def test_cells_with_ids_that_read_the_same_keep_their_own_place(build):
    cells = [replace(build.cell(seed=i), id=name) for i, name in enumerate(["a b", "a/b", "a-b", "a-b-2"])]
    page = Page(report_html(build.run(*cells)))
    assert set(page.ids.values()) == {1}


def test_a_campaign_is_cut_with_its_problems_kept(build, monkeypatch):
    monkeypatch.setattr(html, "MAX_SECTIONS", 5)
    cells = [build.cell(f"s{i}", result=Result.UNKNOWN if i == 11 else Result.PASS) for i in range(12)]
    twins = [build.cell(f"s{i}", role=Role.TWIN) for i in range(12)]
    page = Page(report_html(build.run(*cells, *twins)))
    assert page.tags["article"] == 5
    assert "19 more cells without a section here" in page.words
    assert any("s11" in link for link in page.links)
    assert not {link[1:] for link in page.links} - set(page.ids)


@pytest.mark.parametrize(
    ("got", "wanted", "sentence"),
    [
        ((1, 2), (1, 2), None),
        ((1,), (1, 2), "got 1 token, wanted 2; 1 differs, the first at position 1, counted from 0."),
        ((1, 2, 3), (1,), "got 3 tokens, wanted 1; 2 differ, the first at position 1, counted from 0."),
        ((), (1,), "got 0 tokens, wanted 1; 1 differs, the first at position 0, counted from 0."),
        ((0, *range(1, 100)), tuple(range(50, 150)), "100 differ, the first at position 0, counted from 0. 76 more"),
    ],
)
def test_token_difference(build, got, wanted, sentence):
    load = replace(build.load(wrong_tokens=True), tokens_got=got, tokens_wanted=wanted)
    words = Page(report_html(build.run(build.cell(loads=(load,))))).words
    assert (sentence in words) if sentence else ("first difference" not in words)


def test_what_the_filters_offer_is_what_the_cells_say(troubled, page):
    offered = {value for tag, name, value in page.attributes if tag == "option" and name == "value"} - {""}
    said = {
        word
        for tag, name, value in page.attributes
        if tag == "article" and name in ("data-result", "data-policy", "data-fault")
        for word in value.split()
    }
    assert offered == said
    numbers = {value for tag, name, value in page.attributes if tag == "article" and name == "data-n"}
    places = [v.split() for tag, name, v in page.attributes if tag == "td" and name == "data-cells"]
    assert sorted(number for place in places for number in place) == sorted(numbers)
    assert len(numbers) == len(troubled.cells)


def test_without_the_script_there_is_no_filter_and_nothing_hidden(page):
    hidden = [(tag, name) for tag, name, _ in page.attributes if name == "hidden"]
    assert hidden == [("div", "hidden")]


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "Diagnosis of load 1 Layer 0. Loads"),
        (1, "What would explain it: H0. Loads"),
        (2, "What would explain it, best first: H0. H1. Loads"),
        (7, "H0. H1. H2. H3. H4. 2 more in results.json. Loads"),
    ],
)
def test_hypotheses_are_shown_in_their_order(build, count, said):
    load = replace(build.load(), damage="Layer 0.", diagnosis=tuple(f"H{n}." for n in range(count)))
    assert said in Page(report_html(build.run(build.cell(loads=(load,))))).words


def test_evidence_is_cut_and_counted(build):
    touched = build.cell().evidence[0]
    many = tuple(replace(touched, what=f"block {n}") for n in range(30))
    words = Page(report_html(build.run(build.cell(evidence=many)))).words
    assert "25 more pieces of evidence not shown" in words
    words = Page(report_html(build.run(build.cell(result=Result.FAIL, evidence=many)))).words
    assert "not shown" not in words


def test_hundreds_of_cells_stay_small(smoke):
    cells = [replace(c, id=f"{c.id}/{n}", seed=n) for c in smoke.cells for n in range(4)]
    assert len(cells) == 352
    assert len(report_html(replace(smoke, cells=tuple(cells))).encode()) < 3_000_000
