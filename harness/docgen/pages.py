"""Which pages are generated, and from what. `tests/test_docs_fresh.py` holds that the committed ones are these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.docgen.conformance import conformance_page
from harness.docgen.faults import faults_page
from harness.docgen.interop import checksum_vectors, fingerprint_vectors, payload_vectors
from harness.overhead.calibration_page import overhead_page
from harness.strength.page import strength_page
from harness.strength.plot import strength_plot
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
    "interop-checksums": Page("docs/interop/checksums.json", checksum_vectors, "docs"),
    "interop-fingerprints": Page("docs/interop/fingerprints.json", fingerprint_vectors, "docs"),
    "interop-payloads": Page("docs/interop/payloads.json", payload_vectors, "docs"),
    "strength": Page("docs/strength.md", strength_page, "docs"),
    "strength-plot": Page("docs/strength.svg", strength_plot, "docs"),
    "overhead-rates": Page("docs/overhead.md", overhead_page, "docs"),
    "conformance": Page("docs/conformance.md", conformance_page, "conformance"),
}
