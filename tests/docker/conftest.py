"""Real containers. Only for who asks: `make test-docker`, or `pytest -m docker`.

Whoever asks and has no docker engine is told so by a failure: a skip would look like levers that work.
"""

from __future__ import annotations

import pytest

MARKER = "docker"


def pytest_configure(config):
    config.addinivalue_line("markers", f"{MARKER}: needs a docker engine; run by `make test-docker`")


def pytest_collection_modifyitems(config, items):
    """Leave these tests out unless `-m` asks for them."""
    if MARKER in (config.option.markexpr or ""):
        return
    left = [item for item in items if item.get_closest_marker(MARKER)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session", autouse=True)
def _engine():
    from engine.errors import InputError
    from harness.targets.pairs.docker import check_docker

    try:
        check_docker()
    except InputError as error:
        pytest.fail(str(error), pytrace=False)
