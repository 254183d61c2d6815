"""The page, the summary and the JSON: everything is there, nothing is markup that should not be."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from reports.overhead.html import overhead_html
from reports.overhead.markdown import overhead_markdown
from reports.overhead.results import Left, StudyReport
from reports.overhead.words import amount, between, left_out, percent, rate, seconds, sentence_of
from reports.overhead.write import overhead_json, write_overhead

VOID = {"meta", "br", "img", "path"}


class Reader(HTMLParser):
    """Tags in order, and text; complains about what is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_hostile_names_stay_text(study):
    page = overhead_html(study)
    read = Reader(page)
    assert {"script", "img"} & {tag for tag, _ in read.tags} == set()
    assert not any(name.startswith("on") for _, attrs in read.tags for name in attrs)
    assert "<script>alert(1)</script>" in read.text
    assert not re.search("[\x00-\x08\x1b\u202e]", page)


def test_the_page_loads_nothing_and_its_policy_allows_its_own_style(study):
    page = overhead_html(study)
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page).group(1)
    style = re.search("<style>(.*?)</style>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not re.search(r"(?:src|href)=\"(?!#)", page)
    assert "url(" not in style
    assert "@import" not in style
    assert " style=" not in page


def test_everything_can_be_found_and_has_a_name(study):
    read = Reader(overhead_html(study))
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert [tag for tag, _ in read.tags].count("h1") == 1
    for tag, attrs in read.tags:
        if tag == "svg":
            assert attrs["role"] == "img"
            assert attrs["aria-label"]
        if tag == "th":
            assert attrs["scope"] in ("col", "row")
        if tag == "a":
            assert attrs["href"][1:] in ids
        if "scroll" in (attrs.get("class") or "").split():
            assert (attrs["tabindex"], bool(attrs["aria-label"])) == ("0", True)
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in ids
    assert [tag for tag, _ in read.tags].count("caption") == [tag for tag, _ in read.tags].count("table")


def test_every_figure_is_on_the_page_in_words(study):
    text = Reader(overhead_html(study)).text
    for said in (
        "3 cells: 1 EQUIVALENT, 1 OVERHEAD and 1 INCONCLUSIVE.",
        "+2.00% to +3.00%",
        "-1.00% to unbounded",
        "2 of 80 (2.5%)",
        "3 of 1000 (0.3%)",
        "0.1% to 0.9%",
        "-2.00 ms to +20.0 ms",
        "The stages add up to 1.1 ms a request.",
        "about 123 blocks would bring the interval",
        "4 rows of warm-up dropped.",
        "2 prompts of a block failed more often in one arm",
    ):
        assert said in text, said
    assert text.count("never") == 3  # The 99% quantile of B, of which 2 of 80 failed, in each cell.


def test_a_page_without_anything():
    empty = StudyReport("nothing", (), ())
    assert "No cell was judged." in Reader(overhead_html(empty)).text
    assert "No cell was judged." in overhead_markdown(empty)


def test_the_summary_says_the_same_and_stays_a_table(study):
    page = overhead_markdown(study)
    assert "<script" not in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert any(line.startswith("| 8000tok-low | ✗ OVERHEAD | +2.50% | +2.00% to +3.00% |") for line in rows)
    for line in rows:
        assert line.count("|") in (5, 6, 8) or line.startswith("| stage") or line.count("|") == 4
    assert "| sum | +1.10 ms |" in page
    assert "exact one-sided p for more in B: 0.25" in page


def test_the_json_holds_every_figure_and_no_request(study):
    plain = json.loads(overhead_json(study), parse_constant=pytest.fail)
    assert plain["schema_version"] == 1
    first, _, last = plain["cells"]
    assert first["estimate"]["verdict"] == "EQUIVALENT"
    assert first["estimate"]["relative_high"] == 0.002
    assert first["stages"][0] == {
        "stage": "producer: sum",
        "seconds": 0.0006,
        "interval": {"low": 0.0005, "high": 0.0007},
    }
    assert last["estimate"]["relative_high"] is None
    assert set(first) == {"estimate", "stages", "stages_said"}


def test_all_files_are_written(study, tmp_path):
    write_overhead(tmp_path, study)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.json", "summary.md"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.2345, "1.23 s"),
        (0.012345, "12.3 ms"),
        (0.1, "100 ms"),
        (0.0000123, "12.3 µs"),
        (0.0, "0 ms"),
        (None, "unknown"),
        (math.nan, "unknown"),
        (math.inf, "unbounded"),
    ],
)
def test_times_in_words(value, said):
    assert seconds(value) == said


def test_other_figures_in_words():
    assert (percent(0.0123), percent(-math.inf), percent(math.nan)) == ("+1.23%", "unbounded", "unknown")
    assert (amount(3.14159, "tokens/s", signed=True), amount(None, "tokens/s")) == ("+3.14 tokens/s", "unknown")
    assert (between(None), rate(1, 4), rate(0, 0)) == ("unknown", "1 of 4 (25.0%)", "none of 0")
    assert seconds(-0.5, signed=True) == "-500 ms"
    assert sentence_of([]) == "No cell was judged."
    assert left_out(Left(1, 0, 0, 0, 0)) == ("1 row of warm-up dropped.",)
    assert len(left_out(Left(0, 1, 2, 3, 4))) == 5
