"""What every test shares: one thread a process, a Hypothesis profile, and the files of the repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: tests run in several processes, and more threads only make them wait for each other.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

ROOT = Path(__file__).resolve().parent.parent

# No deadline and no "too slow" check, since no test asserts a wall time. In CI the examples are the same in every run;
# elsewhere they are new ones, and a failure prints what reproduces it.
for _profile, _derandomize in (("kvchaos", False), ("kvchaos-ci", True)):
    settings.register_profile(
        _profile,
        deadline=None,
        derandomize=_derandomize,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("kvchaos-ci" if os.environ.get("CI") else "kvchaos")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def repo_files() -> list[Path]:
    """Every file that is committed or would be (new and not ignored), absolute, in order."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: git says which files belong to the project")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in sorted(set(listed.split("\0"))) if name)
    return [path for path in paths if path.is_file()]
