"""The four files that a run leaves for its readers. `results.json` comes first: the others can be made from it."""

from __future__ import annotations

from pathlib import Path

from reports.files import write_atomically
from reports.html import report_html
from reports.junit import junit_xml
from reports.markdown import summary_markdown
from reports.results import RunResult, write_results

RESULTS_FILE = "results.json"
JUNIT_FILE = "junit.xml"
SUMMARY_FILE = "summary.md"
HTML_FILE = "report.html"
REPORT_FILES = (HTML_FILE, SUMMARY_FILE, JUNIT_FILE, RESULTS_FILE)


def write_reports(run_dir: Path, run: RunResult) -> None:
    """Write every report of `run` into `run_dir`, which must exist.

    Raises:
        ReportError: a file cannot be written.
    """
    write_results(run_dir / RESULTS_FILE, run)
    write_atomically(run_dir / JUNIT_FILE, junit_xml(run))
    write_atomically(run_dir / SUMMARY_FILE, summary_markdown(run))
    write_atomically(run_dir / HTML_FILE, report_html(run))
