"""That the kit finds a bug: the same connector, reading one block too far, must fail it, and the words must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kvchaos_example.staged import StagedConnector, StagedWorker

from engine.connectors.base import LoadSpec
from harness.kit import ConnectorConformance


class OffByOneWorker(StagedWorker):
    def start_loads(self, loads: Sequence[LoadSpec]) -> None:
        super().start_loads([replace(load, remote_block_ids=self._one_further(load)) for load in loads])

    def _one_further(self, load: LoadSpec) -> dict[int, tuple[int, ...]]:
        return {group_id: (*ids[1:], ids[-1]) for group_id, ids in load.remote_block_ids.items()}


class OffByOne(StagedConnector):
    def worker(self, config, memory, fabric) -> OffByOneWorker:
        return OffByOneWorker(config.engine_id, memory, fabric)


@pytest.mark.parametrize("consumer", ["HND", "NHD"])
def test_an_off_by_one_is_found_and_told(consumer: str) -> None:
    kit = ConnectorConformance()
    with pytest.raises(pytest.fail.Exception) as failed:
        kit.test_clean_loads_verify(OffByOne(), "HND", consumer, 16)
    assert "verdict is mismatch, expected verified" in str(failed.value)
    assert "hold what belongs 1 block position later" in str(failed.value)
    with pytest.raises(pytest.fail.Exception) as failed:
        kit.test_it_loads_exactly_its_blocks(OffByOne(), prefix_hit=False)
    assert "hold what belongs 1 block position later" in str(failed.value)
