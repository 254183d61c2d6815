"""The conformance kit for authors of connectors: subclass `ConnectorConformance` in a test file and run pytest.

    from harness.kit import ConnectorConformance

    class TestMine(ConnectorConformance):
        connector = "mine"          # the name of its entry point, or the factory itself

A test that fails says in words what is wrong, and what would explain the KV that D was given. Needs pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from engine.checksum.policy import LoadFailurePolicy
from engine.connectors.multi import MultiConnector
from engine.connectors.offload import OFFLOAD
from engine.connectors.registry import CONNECTORS, ConnectorFactory
from harness.conformance.cells import Ran, run_scenario
from harness.conformance.exact import exact_blocks_trouble
from harness.conformance.hostile import hostile_trouble
from harness.conformance.promises import carrier_trouble, failure_trouble, lease_trouble
from harness.conformance.situations import (
    KIT_BLOCK_SIZES,
    LAYOUTS,
    MIXED_BLOCK_SIZES,
    SITUATIONS,
    TROUBLE_CELLS,
    TROUBLES,
    clean_scenario,
    trouble_scenario,
)
from scenarios.words import Policy, Result

__all__ = ["ConnectorConformance"]


class ConnectorConformance:
    """Every test of a connector that carries checksums. `seed` drives weights, prompts and interleavings."""

    connector: ClassVar[str | ConnectorFactory]
    seed: ClassVar[int] = 0

    @pytest.fixture
    def factory(self) -> ConnectorFactory:
        """The connector under test."""
        return self.under_test()

    def under_test(self) -> ConnectorFactory:
        """The factory that `connector` names or is."""
        if not isinstance(self.connector, str):
            return self.connector
        try:
            return CONNECTORS.choose(self.connector)
        except KeyError:
            pytest.fail(f"There is no connector {self.connector!r}, only {', '.join(CONNECTORS.names)}.", pytrace=False)

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """The engines are tiny: more threads only wait for each other."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    # ---- loads without a fault

    @pytest.mark.parametrize("block_size", KIT_BLOCK_SIZES)
    @pytest.mark.parametrize("consumer", LAYOUTS)
    @pytest.mark.parametrize("producer", LAYOUTS)
    def test_clean_loads_verify(self, factory: ConnectorFactory, producer: str, consumer: str, block_size: int) -> None:
        topology = {
            "producer": {"layout": producer, "block_size": block_size},
            "consumer": {"layout": consumer, "block_size": block_size},
        }
        _passes(run_scenario(factory, clean_scenario(Policy.FAIL_OPEN, topology), Policy.FAIL_OPEN, self.seed))

    @pytest.mark.parametrize(("producer", "consumer"), MIXED_BLOCK_SIZES)
    def test_clean_loads_verify_across_block_sizes(
        self, factory: ConnectorFactory, producer: int, consumer: int
    ) -> None:
        """EXT-2: sums of blocks are compared, so the copy must be right to the token."""
        topology = {"producer": {"block_size": producer}, "consumer": {"block_size": consumer}}
        _passes(run_scenario(factory, clean_scenario(Policy.FAIL_OPEN, topology), Policy.FAIL_OPEN, self.seed))

    @pytest.mark.parametrize("situation", SITUATIONS)
    def test_clean_loads_verify_with(self, factory: ConnectorFactory, situation: str) -> None:
        differs = SITUATIONS[situation]
        scenario = clean_scenario(Policy.FAIL_OPEN, differs.get("topology", {}), differs.get("workload"))
        _passes(run_scenario(factory, scenario, Policy.FAIL_OPEN, self.seed))

    @pytest.mark.parametrize("policy", [policy for policy in Policy if policy is not Policy.FAIL_OPEN])
    def test_clean_loads_are_served_under(self, factory: ConnectorFactory, policy: Policy) -> None:
        topology = {"producer": {"layout": "HND"}, "consumer": {"layout": "NHD"}}
        _passes(run_scenario(factory, clean_scenario(policy, topology), policy, self.seed))

    def test_the_seed_decides_everything(self, factory: ConnectorFactory) -> None:
        scenario = clean_scenario(Policy.FAIL_OPEN, {})
        first, again = (run_scenario(factory, scenario, Policy.FAIL_OPEN, self.seed).lines for _ in range(2))
        if first != again:
            _fail("Two runs of one cell left different histories: a connector may not ask a clock, hash() or chance.")

    # ---- faults of the transport

    @pytest.mark.parametrize(("trouble", "policy"), TROUBLE_CELLS)
    def test_what_goes_wrong_is_noticed(self, factory: ConnectorFactory, trouble: str, policy: Policy) -> None:
        ran = run_scenario(factory, trouble_scenario(trouble, policy), policy, self.seed)
        _passes(ran, TROUBLES[trouble].hint if ran.result.result is Result.UNKNOWN else "")

    # ---- what it promises

    def test_it_carries_checksums(self, factory: ConnectorFactory) -> None:
        _none(carrier_trouble(factory))

    def test_it_holds_blocks_for_the_consumer(self, factory: ConnectorFactory) -> None:
        _none(lease_trouble(factory))

    @pytest.mark.parametrize("prefix_hit", [False, True], ids=["whole", "after a prefix hit"])
    def test_it_loads_exactly_its_blocks(self, factory: ConnectorFactory, prefix_hit: bool) -> None:
        _none(exact_blocks_trouble(factory, prefix_hit=prefix_hit))

    @pytest.mark.parametrize("load_failure", ["fail", "recompute"])
    def test_an_unknown_producer_is_a_failed_load(
        self, factory: ConnectorFactory, load_failure: LoadFailurePolicy
    ) -> None:
        _none(failure_trouble(factory, load_failure, connected=False))

    @pytest.mark.parametrize("load_failure", ["fail", "recompute"])
    def test_a_producer_of_another_shape_is_a_failed_load(
        self, factory: ConnectorFactory, load_failure: LoadFailurePolicy
    ) -> None:
        _none(failure_trouble(factory, load_failure, producer_model="small"))

    @pytest.mark.parametrize("first", [True, False], ids=["asked first", "asked last"])
    def test_it_can_be_a_part_of_a_multi_connector(self, factory: ConnectorFactory, first: bool) -> None:
        """CAR-2: with an offloading connector beside it, which has no carrier."""
        parts = (factory, OFFLOAD) if first else (OFFLOAD, factory)
        multi = MultiConnector("kit_multi", "the connector under test and an offloading one", parts)
        _none(carrier_trouble(multi))
        _passes(run_scenario(multi, clean_scenario(Policy.FAIL_CLOSED_FAIL, {}), Policy.FAIL_CLOSED_FAIL, self.seed))
        trouble = trouble_scenario("a bit flips on P after it was summed", Policy.FAIL_CLOSED_FAIL)
        _passes(run_scenario(multi, trouble, Policy.FAIL_CLOSED_FAIL, self.seed))

    def test_parameters_that_no_producer_sends_do_no_harm(self, factory: ConnectorFactory) -> None:
        _none(hostile_trouble(factory))


def _passes(ran: Ran, hint: str = "") -> None:
    trouble = ran.trouble
    _none(trouble if trouble is None or not hint else f"{trouble}\n{hint}")


def _none(trouble: str | None) -> None:
    if trouble is not None:
        _fail(trouble)


def _fail(text: str) -> None:
    pytest.fail(text, pytrace=False)
