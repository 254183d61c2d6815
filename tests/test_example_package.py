"""docs/extending.md and its example, a distribution of its own: installed into a folder, tested and used.

It is copied first, so that building it leaves nothing here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

BROKEN = """
from harness.kit import ConnectorConformance
from test_planted import OffByOne


class TestBroken(ConnectorConformance):
    connector = OffByOne()
"""
# In one process, which imports torch once.
ONE_AFTER_THE_OTHER = """
import shlex, sys
from harness.cli import main

for command in sys.argv[1:]:
    print(f"$ {command}", flush=True)
    sys.argv = shlex.split(command)
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""
LISTING = re.compile(r"<!-- from (?P<file>\S+) -->\n```\w+\n(?P<text>.*?)\n```\n", re.DOTALL)
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A copy of the example, and a folder into which it was installed."""

    source: Path
    site: Path

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy, with the folder on the path and without the settings of this run."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.source,
            env=inherited | {"PYTHONPATH": f"{self.site}{os.pathsep}{self.source / 'tests'}", "PATH": path},
            capture_output=True,
            text=True,
        )

    def pytest(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


@pytest.fixture(scope="module")
def package(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("example")
    made = Package(folder / "source", folder / "site")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "runs")
    shutil.copytree(root / "tests" / "example_package", made.source, ignore=unwanted)
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = made.run(sys.executable, "-m", "pip", "install", *options, "--target", made.site, ".")
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="module")
def guide(root: Path) -> str:
    return (root / "docs" / "extending.md").read_text()


# ---- the package


def test_its_own_tests_pass(package: Package) -> None:
    """Among them the kit for its connector, and the same connector with an off-by-one that must fail the kit."""
    done = package.pytest("tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(\d+) passed", done.stdout)
    assert "skipped" not in done.stdout


def test_a_connector_with_an_off_by_one_fails_the_kit_and_is_told_why(package: Package, guide: str) -> None:
    (package.source / "test_broken.py").write_text(BROKEN)
    done = package.pytest("test_broken.py", "-k", "exactly or HND-16 or carries")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hold what belongs 1 block position later" in done.stdout
    assert "verdict is mismatch, expected verified" in done.stdout
    assert "Traceback" not in done.stdout
    assert re.search(r"4 failed, 1 passed", done.stdout), done.stdout
    shown = re.search(r"<!-- output of the planted bug -->\n```text\n(.*?)```", guide, re.DOTALL)
    assert shown is not None
    assert shown[1] in done.stdout


def test_with_the_example_installed_what_kvchaos_has_still_works(package: Package, root: Path) -> None:
    smoke = root / "scenarios" / "smoke"
    chosen = [smoke / "torn-read-during-reuse.yaml", smoke / "clean-other-block-size.yaml"]
    done = package.run("kvchaos", "run", *chosen, "--connector", "staged", "--runs-dir", "out")
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the guide


def test_every_listing_of_the_guide_is_in_the_package(root: Path, guide: str) -> None:
    listings = LISTING.findall(guide)
    for file, text in listings:
        assert text in (root / "tests" / "example_package" / file).read_text(), f"{file} does not hold:\n{text}"
    code = [text for language, text in FENCE.findall(guide) if language in ("python", "toml", "yaml")]
    assert len(listings) == len(code)
    shown = {file for file, _ in listings}
    sources = (root / "tests" / "example_package" / "src").rglob("*.py")
    assert {str(path.relative_to(root / "tests" / "example_package")) for path in sources} <= shown


def test_every_command_of_the_guide_works(package: Package, guide: str) -> None:
    """They need the example: tests/test_docs_commands.py, which runs the other pages', leaves them out (`norun`)."""
    commands = [line for language, text in FENCE.findall(guide) if language == "sh" for line in text.splitlines()]
    ours = [command for command in commands if command.startswith("kvchaos ")]
    # The fixture has done the first, into a folder of its own; what the second runs has a test above.
    assert [command for command in commands if command not in ours] == [
        "pip install --no-deps -e .",
        "python -m pytest tests/test_staged.py",
    ]
    assert (package.source / "tests" / "test_staged.py").is_file()
    done = package.run(sys.executable, "-c", ONE_AFTER_THE_OTHER, *ours)
    assert done.returncode == 0, done.stdout + done.stderr
    for command in ours:
        _, _, output = done.stdout.partition(f"$ {command}\n")
        output, _, _ = output.partition("\n$ ")
        assert "kvchaos-example 0.1.0" in output or not command.startswith("kvchaos list"), command
        assert "PASSED" in output or not command.startswith("kvchaos run"), command


def test_the_message_that_the_guide_shows_is_real(guide: str, install, capsys, monkeypatch) -> None:
    from harness.cli import main

    module = "class Hose:\n    API_VERSION = 2\nHOSE = Hose()"
    install("acme-hose", "kvchaos.connectors", {"hose": "acme_hose:HOSE"}, {"acme_hose": module})
    monkeypatch.setattr(sys, "argv", ["kvchaos", "list", "connectors"])
    with pytest.raises(SystemExit):
        main()
    assert f"```text\n{capsys.readouterr().err}```" in guide
