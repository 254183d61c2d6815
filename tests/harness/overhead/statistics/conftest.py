"""`synthetic`: rows of studies whose truth is known."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def synthetic() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "synthetic.py")))
