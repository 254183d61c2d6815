"""docker-compose.yml: `docker compose up` breaks a pair, `--profile load` measures another, and neither starts both."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.commands.overhead import overhead
from harness.commands.serve import engine, proxy


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((root / "docker-compose.yml").read_text())["services"]
    return found


def started_by(services: dict[str, Any], profile: str) -> set[str]:
    return {name for name, service in services.items() if profile in service.get("profiles", [profile])}


def words(command: str) -> list[str]:
    """Without variables set."""
    return shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", command))


def test_each_profile_starts_one_pair_and_what_drives_it(services: dict[str, Any], root: Path) -> None:
    assert (root / ".env").read_text().splitlines()[-1] == "COMPOSE_PROFILES=chaos"
    assert started_by(services, "chaos") == {"producer", "consumer", "proxy", "runner"}
    pair = {"producer-load", "consumer-load", "proxy-load"}
    assert started_by(services, "load") == {*pair, "load"}
    assert started_by(services, "locust") == {*pair, "locust"}
    for name in ("load", "locust"):
        assert set(services[name]["depends_on"]) == pair


@pytest.mark.parametrize("name", ["producer-load", "consumer-load", "proxy-load"])
def test_the_pair_that_is_measured_has_no_control_channel(services: dict[str, Any], name: str) -> None:
    _, what, *arguments = words(services[name]["command"])
    command = {"engine": engine, "proxy": proxy}[what]
    options = command.make_context("serve", arguments).params
    assert options["control"] is None
    assert services[name]["environment"] == {}
    if what == "engine":
        assert options["allow_checksum_switch"]
        assert not options["prefix_caching"]
        assert options["num_blocks"] * options["block_size"] >= options["max_num_seqs"] * 8004


def test_the_study_is_bounded_and_leaves_its_report_on_the_host(services: dict[str, Any]) -> None:
    name, *arguments = words(services["load"]["command"])
    options = overhead.make_context(name, arguments).params
    assert options["time_limit"] <= 600
    assert options["url"] == "http://proxy-load:8000"
    assert str(options["runs_dir"]) == "/runs"
    assert "./runs:/runs" in services["load"]["volumes"]
    assert "./runs:/runs" in services["locust"]["volumes"]
    assert "--run-time" in words(services["locust"]["command"])
