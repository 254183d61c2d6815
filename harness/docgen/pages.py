"""Which pages are generated, and from what. `tests/test_docs_fresh.py` holds that the committed ones are these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.docgen.conformance import conformance_page
from harness.docgen.faults import faults_page
from scenarios.json_schema import schema_text


@dataclass(frozen=True, slots=True)
class Page:
    """A generated file: where it is below the root of the repository, what makes its text, and which make target."""

    path: str
    text: Callable[[Path], str]
    target: str


PAGES: Mapping[str, Page] = {
    "faults": Page("docs/faults.md", faults_page, "docs"),
    "schema": Page("docs/scenario.schema.json", lambda root: schema_text(), "docs"),
    "conformance": Page("docs/conformance.md", conformance_page, "conformance"),
}
