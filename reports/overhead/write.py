"""The files that an overhead study leaves for its readers. `results.json` comes first: it holds every figure."""

from __future__ import annotations

import json
from pathlib import Path

from reports.files import write_atomically
from reports.overhead.html import overhead_html
from reports.overhead.markdown import overhead_markdown
from reports.overhead.results import StudyReport, finite
from reports.records import to_json
from reports.write import HTML_FILE, RESULTS_FILE, SUMMARY_FILE

SCHEMA_VERSION = 1


def overhead_json(study: StudyReport) -> str:
    """Every figure of the study; not the requests, which are in rows.csv. An unbounded or unknown figure is null."""
    plain = to_json(study)
    for cell in plain["cells"]:
        del cell["a"], cell["b"]
    return json.dumps(finite({"schema_version": SCHEMA_VERSION, **plain}), indent=1, allow_nan=False) + "\n"


def write_overhead(run_dir: Path, study: StudyReport) -> None:
    """Write every report of `study` into `run_dir`, which must exist.

    Raises:
        ReportError: a file cannot be written.
    """
    write_atomically(run_dir / RESULTS_FILE, overhead_json(study))
    write_atomically(run_dir / SUMMARY_FILE, overhead_markdown(study))
    write_atomically(run_dir / HTML_FILE, overhead_html(study))
