"""NIXL's progress thread waits for events; a NIXL that cannot be told so is left as it is."""

import importlib.util
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from engine.connectors.nixl_progress import PROGRESS_US, waiting_for_events


class Config:
    """As NIXL's: `pthrDelay` is set by whoever makes an agent."""

    pthrDelay = 0  # noqa: N815 - NIXL's name
    useProgThread = False  # noqa: N815 - NIXL's name


@pytest.fixture
def api(monkeypatch):
    """A module like `nixl._api`, whose agent fixes the delay at 0."""
    module = ModuleType("nixl_api_played")
    module.nixlBind = SimpleNamespace(nixlAgentConfig=Config)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Agent:
        def __init__(self):
            self.config = module.nixlBind.nixlAgentConfig()
            self.config.useProgThread = True
            self.config.pthrDelay = 0

    Agent.__module__ = module.__name__
    module.nixl_agent = Agent
    return module


def test_an_agent_is_made_with_a_delay_and_nothing_else_is_changed(api):
    with waiting_for_events(api.nixl_agent):
        config = api.nixl_agent().config
    assert (config.pthrDelay, config.useProgThread) == (PROGRESS_US, True)
    assert isinstance(config, Config)
    assert api.nixlBind.nixlAgentConfig is Config
    assert api.nixl_agent().config.pthrDelay == 0


def test_an_agent_that_cannot_be_made_leaves_nothing_behind(api):
    with pytest.raises(RuntimeError, match="no backend"), waiting_for_events(api.nixl_agent):
        raise RuntimeError("no backend")
    assert api.nixlBind.nixlAgentConfig is Config


@pytest.mark.parametrize("bindings", [None, SimpleNamespace(), SimpleNamespace(nixlAgentConfig=object)])
def test_a_nixl_that_is_built_otherwise(api, bindings):
    api.nixlBind = bindings
    with waiting_for_events(api.nixl_agent):
        assert api.nixlBind is bindings


def test_the_nixl_that_is_installed_can_be_told():
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed")
    script = (
        "from nixl._api import nixl_agent, nixlBind\n"
        "from engine.connectors.nixl_progress import waiting_for_events\n"
        "with waiting_for_events(nixl_agent):\n"
        "    config = nixlBind.nixlAgentConfig()\n"
        "    config.pthrDelay = 0\n"
        "print(config.pthrDelay)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(PROGRESS_US)
