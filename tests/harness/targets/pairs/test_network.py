"""The lever `Network` over containers: which scripts run where. Whether they work is tests/docker's to say."""

from __future__ import annotations

import pytest

from faults.levers import LeverError
from harness.targets.pairs.network import COUNT_FILTERED, COUNT_SHAPED, HEAL, ContainerNetwork


class Namespaces:
    """Notes what is run, and prints what a test wants."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []
        self.printed = ""

    def run_in(self, side: str, script: str) -> str:
        self.ran.append((side, script))
        return self.printed

    def network(self) -> ContainerNetwork:
        return ContainerNetwork(self.run_in, {"producer": "10.1.0.2", "consumer": "10.1.0.3"}.__getitem__)


@pytest.fixture
def namespaces() -> Namespaces:
    return Namespaces()


@pytest.mark.parametrize(
    ("change", "rule"),
    [("cut", "-j DROP"), ("reset", "-p tcp ! --tcp-flags RST RST -j REJECT --reject-with tcp-reset")],
)
def test_only_packets_of_the_producer_are_filtered_and_only_at_the_consumer(
    namespaces: Namespaces, change: str, rule: str
) -> None:
    network = namespaces.network()
    assert "iptables" in getattr(network, change)()
    ((side, script),) = namespaces.ran
    assert side == "consumer"
    assert f"-A kvchaos {rule}\n" in script
    assert "-I INPUT -s 10.1.0.2 -j kvchaos" in script
    assert "-I OUTPUT -d 10.1.0.2 -j kvchaos" in script


def test_only_what_goes_to_the_consumer_is_slowed_and_it_says_how(namespaces: Namespaces) -> None:
    namespaces.printed = "tbf rate 256kbit burst 4kb latency 60s\n"
    assert namespaces.network().slow(256) == "tbf rate 256kbit burst 4kb latency 60s"
    ((side, script),) = namespaces.ran
    assert side == "producer"
    assert "u32 match ip dst 10.1.0.3/32 flowid 1:2" in script
    assert script.index("netem delay") < script.index("tbf rate 256kbit")


@pytest.mark.parametrize(("change", "count"), [("cut", COUNT_FILTERED), ("reset", COUNT_FILTERED)])
def test_packets_are_counted_where_the_rules_are(namespaces: Namespaces, change: str, count: str) -> None:
    network = namespaces.network()
    assert network.touched() == 0
    assert namespaces.ran == []
    getattr(network, change)()
    namespaces.printed = "12\n"
    assert network.touched() == 12
    assert namespaces.ran[-1] == ("consumer", count)


def test_a_slow_link_counts_at_the_producer(namespaces: Namespaces) -> None:
    network = namespaces.network()
    network.slow(8)
    namespaces.printed = "7"
    assert network.touched() == 7
    assert namespaces.ran[-1] == ("producer", COUNT_SHAPED)


def test_a_counter_that_cannot_be_read_is_an_error_and_not_zero(namespaces: Namespaces) -> None:
    network = namespaces.network()
    network.cut()
    namespaces.printed = ""
    with pytest.raises(LeverError, match="not counted: ''"):
        network.touched()


def test_healing_happens_once_and_only_where_something_was_done(namespaces: Namespaces) -> None:
    network = namespaces.network()
    network.heal()
    assert namespaces.ran == []
    network.cut()
    network.heal()
    network.heal()
    assert [entry for entry in namespaces.ran if entry[1] == HEAL] == [("consumer", HEAL)]


def test_a_change_on_a_change_is_refused_until_it_is_healed(namespaces: Namespaces) -> None:
    network = namespaces.network()
    network.cut()
    with pytest.raises(LeverError, match="heal it first"):
        network.slow(64)
    network.heal()
    network.slow(64)


def test_rules_go_with_the_container_that_had_them(namespaces: Namespaces) -> None:
    network = namespaces.network()
    network.cut()
    network.forget("producer")
    network.forget("consumer")
    network.heal()
    assert len(namespaces.ran) == 1


def test_a_change_that_failed_halfway_is_healed_too(namespaces: Namespaces) -> None:
    def broken(side: str, script: str) -> str:
        namespaces.ran.append((side, script))
        if script != HEAL:
            raise LeverError("no such target")
        return ""

    network = ContainerNetwork(broken, lambda side: "10.1.0.2")
    with pytest.raises(LeverError):
        network.cut()
    network.heal()
    assert namespaces.ran[-1] == ("consumer", HEAL)
