"""The files of deploy/ fit docker-compose.yml: what one says of a service holds for the other."""

import shlex

import pytest
import yaml


@pytest.fixture
def services(root):
    return yaml.safe_load((root / "docker-compose.yml").read_text())["services"]


def test_engines_on_gpus_are_those_of_the_compose_file_on_another_device(root, services):
    override = yaml.safe_load((root / "deploy" / "compose.gpu.yml").read_text())["services"]
    assert set(override) == {"producer", "consumer"}
    for name, service in override.items():
        words, plain = shlex.split(service["command"]), shlex.split(services[name]["command"])
        assert sorted(words) == sorted([*plain, "--device", "cuda"])
        (gpu,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert gpu["capabilities"] == ["gpu"]
        assert len(gpu["device_ids"]) == 1


def test_prometheus_asks_both_engines_where_they_answer(root, services):
    config = yaml.safe_load((root / "deploy" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    for target in job["static_configs"][0]["targets"]:
        name, _, port = target.partition(":")
        assert f"--port {port}" in services[name]["command"]
    mounted = [volume.split(":")[1].rpartition("/")[2] for volume in services["prometheus"]["volumes"]]
    assert mounted == ["prometheus.yml", *config["rule_files"]]


def test_what_has_a_control_channel_publishes_nothing(root, services):
    """Whoever holds its token can change KV: nothing of this rig may be reached from outside."""
    (default,) = [line for line in (root / ".env").read_text().splitlines() if line.startswith("COMPOSE_PROFILES=")]
    started = [name for name, service in services.items() if default.partition("=")[2] in service["profiles"]]
    assert started == ["producer", "consumer", "proxy", "runner"]
    controlled = [name for name, service in services.items() if "--control" in service.get("command", "")]
    assert controlled == ["producer", "consumer", "proxy"]
    for name in started:
        assert "ports" not in services[name], name
        assert services[name]["networks"] == ["kv"], name


def test_every_port_is_published_on_loopback_only(services):
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert str(port).startswith("127.0.0.1:"), name
