"""Connectors by name: what is taken in, and what is said of one that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors import DEFAULT_CONNECTOR
from engine.connectors.fabric import Fabric
from engine.connectors.pull import PULL, PullConnector, PullScheduler, PullWorker
from engine.connectors.registry import API_VERSION, CONNECTORS, GROUP, ConnectorFactory
from engine.core import connected_engine
from engine.errors import EXIT_USAGE
from engine.extensions import LOADED, OWN, ExtensionError, Registry, lacks
from engine.seams import Seams

Install = Callable[..., None]

GOOD = """
    class Hose:
        API_VERSION = 1
        name = "hose"
        summary = "water through a hose"

        def scheduler(self, config, clock):
            return ("scheduler", config, clock)

        def worker(self, config, memory, fabric):
            return ("worker", config, memory, fabric)

    HOSE = Hose()
"""


def point(name: str = "hose", value: str = "acme_hose:HOSE") -> dict[str, str]:
    return {name: value}


def problem(name: str = "hose") -> str:
    with pytest.raises(ExtensionError) as caught:
        CONNECTORS.choose(name)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- kvchaos' own


def test_the_pull_connector_is_there_and_builds_both_sides() -> None:
    factory: ConnectorFactory = CONNECTORS.choose(DEFAULT_CONNECTOR)
    assert factory is PULL
    assert factory.API_VERSION == API_VERSION
    fabric, clock = Fabric(Seams()), VirtualClock()
    engine = connected_engine(factory, EngineConfig("e", lease_ticks=5), Seams(), clock, fabric)
    assert isinstance(engine.connector, PullScheduler)
    assert fabric.peer("e") is engine.memory
    assert isinstance(factory.worker(EngineConfig("f"), engine.memory, fabric), PullWorker)
    assert CONNECTORS.distribution(DEFAULT_CONNECTOR) == OWN


def test_a_name_that_nobody_has_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="teleport"):
        CONNECTORS["teleport"]
    with pytest.raises(KeyError, match="teleport"):
        CONNECTORS.choose("teleport")


# ---- what is installed


def test_an_installed_connector_is_imported_when_it_is_named(install: Install) -> None:
    install("acme-hose", GROUP, point(), {"acme_hose": GOOD}, version="2.5")
    assert {"hose", "pull"} <= set(CONNECTORS.names)
    assert CONNECTORS.installed == ["hose"]
    assert "hose" not in CONNECTORS
    assert "acme-hose" not in LOADED
    assert CONNECTORS["hose"].summary == "water through a hose"
    assert "hose" in CONNECTORS
    assert CONNECTORS["hose"] is CONNECTORS.choose("hose")
    assert CONNECTORS.distribution("hose") == "acme-hose 2.5"
    assert LOADED["acme-hose"] == "2.5"


def test_both_sides_get_what_they_are_built_from(install: Install) -> None:
    install("acme-hose", GROUP, point(), {"acme_hose": GOOD})
    factory = CONNECTORS["hose"]
    assert factory.scheduler("config", "clock") == ("scheduler", "config", "clock")
    assert factory.worker("config", "memory", "fabric") == ("worker", "config", "memory", "fabric")


def test_a_broken_extension_troubles_only_who_names_it(install: Install) -> None:
    install("acme-hose", GROUP, point(), {"acme_hose": "raise RuntimeError('no water')"})
    assert CONNECTORS.choose("pull") is PULL
    assert "hose" in CONNECTORS.names
    assert problem() == (
        "connector hose of acme-hose 1.0 (entry point hose = acme_hose:HOSE in kvchaos.connectors) cannot be imported "
        "(RuntimeError: no water): repair or uninstall acme-hose 1.0"
    )


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise ValueError('one\\ntwo')", "ValueError: one"),
        ("raise ValueError", "(ValueError)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("HOES = 1", "AttributeError: module 'acme_hose' has no attribute 'HOSE'"),
    ],
)
def test_what_cannot_be_imported_is_told_in_one_line(install: Install, module: str, reason: str) -> None:
    install("acme-hose", GROUP, point(), {"acme_hose": module})
    assert "cannot be imported" in problem()
    assert reason in problem()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("API_VERSION = 1", "API_VERSION = 2", "declares API_VERSION 2, this kvchaos takes 1"),
        ("API_VERSION = 1", "API_VERSION = 0", "declares API_VERSION 0, this kvchaos takes 1"),
        ("API_VERSION = 1", "API_VERSION = '1'", "declares no API_VERSION: set API_VERSION = 1"),
        ("API_VERSION = 1", "API_VERSION = True", "declares no API_VERSION"),
        ("        API_VERSION = 1", "", "declares no API_VERSION"),
        ('name = "hose"', 'name = "pipe"', "has the name 'pipe'"),
        ('name = "hose"', "name = 7", "has no name, one line of text"),
        ('summary = "water', 'summary = "" # "water', "has no summary, one line of text"),
        ("def worker(", "def wroker(", "lacks the method worker"),
        ("def scheduler(", "scheduler = 5\n        def x(", "lacks the method scheduler"),
        ("HOSE = Hose()", "HOSE = Hose", "is the class Hose: let the entry point name an instance of it"),
        ("HOSE = Hose()", "HOSE = None", "declares no API_VERSION"),
    ],
)
def test_what_does_not_keep_the_protocol_is_refused(install: Install, old: str, new: str, words: str) -> None:
    assert old in GOOD
    install("acme-hose", GROUP, point(), {"acme_hose": GOOD.replace(old, new)})
    assert words in problem()
    assert problem().startswith("connector hose of acme-hose 1.0 (entry point hose = acme_hose:HOSE in ")
    assert "hose" not in CONNECTORS


def test_a_name_of_kvchaos_own_is_refused_where_it_is_named(install: Install) -> None:
    install("acme-hose", GROUP, point("pull"), {"acme_hose": GOOD.replace('"hose"', '"pull"')})
    assert problem("pull") == (
        "connector pull: kvchaos and acme-hose 1.0 have one each (entry points in kvchaos.connectors: "
        "pull = acme_hose:HOSE): uninstall or rename all but one"
    )
    assert CONNECTORS["pull"] is PULL


def test_a_name_that_two_distributions_have_is_refused(install: Install) -> None:
    install("acme-hose", GROUP, point(), {"acme_hose": GOOD})
    install("zeta", GROUP, point(value="zeta_hose:HOSE"), {"zeta_hose": GOOD})
    assert "acme-hose 1.0 and zeta 1.0 have one each" in problem()
    assert "hose = acme_hose:HOSE; hose = zeta_hose:HOSE" in problem()


def test_entry_points_of_other_groups_are_not_looked_at(install: Install) -> None:
    install("acme-hose", "kvchaos.gardens", point(), {"acme_hose": GOOD})
    assert "hose" not in CONNECTORS.names


# ---- registering by hand


class Hand(PullConnector):
    name = "hand"


def test_a_connector_can_be_registered_for_this_process() -> None:
    registry: Registry[ConnectorFactory] = Registry(GROUP, "connector", 1, {PULL.name: PULL}, lambda _: None)
    hand = Hand()
    registry.register("hand", hand)
    assert registry["hand"] is hand
    assert registry.distribution("hand") == OWN
    registry.forget()
    assert "hand" not in registry
    assert registry["pull"] is PULL


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pull", "connector pull: the name is taken by one of kvchaos' own"),
        ("foot", "connector foot has the name 'hand': let it and the entry point have the same name"),
    ],
)
def test_registering_checks_as_well(name: str, words: str) -> None:
    with pytest.raises(ExtensionError, match=words):
        CONNECTORS.register(name, Hand())


def test_lacks_names_every_missing_method() -> None:
    assert lacks(PULL, ("name",), ("scheduler", "fly", "swim")) == "lacks the methods fly, swim"
    assert lacks(PULL, ("name",), ("scheduler",)) is None


def test_kvchaos_is_not_among_what_was_loaded() -> None:
    assert version(OWN)
    assert OWN not in LOADED
