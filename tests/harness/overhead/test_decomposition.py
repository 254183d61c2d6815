"""What the engines' counters add up to, and when they do not explain a difference."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
import pytest

from engine.checksum.policy import ChecksumSettings
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.fabric import Fabric
from engine.core import EngineCore, pull_engine
from engine.request import Request
from engine.seams import Seams
from engine.server.metrics import EngineMetrics
from harness.overhead import decomposition as d

SETTINGS = ChecksumSettings(kv_checksum_mode="log", allow_checksum_switch=True)
PAGE = """\
# TYPE kvchaos_checksum_seconds counter
kvchaos_checksum_seconds_total{stage="sum"} 1.5
kvchaos_checksum_seconds_total{stage="copy"} 0.25
kvchaos_checksum_seconds_total{stage="encode"} 0.5
kvchaos_checksum_seconds_total{stage="decode"} 0
kvchaos_checksum_seconds_total{stage="compare"} 0
# TYPE kvchaos_checksum_payload_bytes counter
kvchaos_checksum_payload_bytes_total{direction="sent"} 100
kvchaos_checksum_payload_bytes_total{direction="received"} 7
# TYPE kvchaos_checksum_records counter
kvchaos_checksum_records_total 3
"""


class Pair:
    """Two engines that are stepped by hand, and their metrics."""

    def __init__(self) -> None:
        seams, clock = Seams(), VirtualClock()
        self.fabric = Fabric(seams)
        self.engines: dict[str, EngineCore] = {
            name: pull_engine(EngineConfig(name, checksum=SETTINGS), seams, clock, self.fabric)
            for name in (d.PRODUCER, d.CONSUMER)
        }
        self.metrics = {name: EngineMetrics(lambda engine=engine: engine) for name, engine in self.engines.items()}  # type: ignore[misc]

    def serve(self, name: str, kv_checksum: bool) -> None:
        prompt = [11, 22, 33] * 14
        producer, consumer = self.engines.values()
        producer.add_request(Request(name, prompt, 1, {"do_remote_decode": True}, kv_checksum))
        params = self._finish(producer)
        consumer.add_request(Request(name, prompt, 2, params, kv_checksum))
        self._finish(consumer)

    def _finish(self, engine: EngineCore) -> Mapping[str, object] | None:
        while True:
            while self.fabric.ready():
                self.fabric.ready()[0]()
            for output in engine.step():
                return output.kv_transfer_params

    def read(self) -> dict[str, d.Reading]:
        return {name: d.read_metrics(metrics.text().decode(), name) for name, metrics in self.metrics.items()}


def test_every_stage_is_of_the_requests_that_have_checksums() -> None:
    pair = Pair()
    before = pair.read()
    pair.serve("a", kv_checksum=False)
    between = pair.read()
    pair.serve("b", kv_checksum=True)
    off, on = d.costs(before, between, 1), d.costs(between, pair.read(), 1)
    assert off == d.Costs(1)
    assert all(seconds > 0 for seconds in on.seconds.values())
    # Three blocks: 8 bytes each, in base64, and little around them.
    assert 32 < on.payload_bytes < 80
    assert on.summed == 2


def test_a_page() -> None:
    reading = d.read_metrics(PAGE, "x")
    assert reading == d.Reading({"sum": 1.5, "copy": 0.25, "encode": 0.5, "decode": 0, "compare": 0}, 100, 3)


@pytest.mark.parametrize(
    "text", ["", "vllm:num_requests 3\n", "<html>", PAGE.replace('stage="copy"', 'stage="x"'), 'a{b="c} 1\n']
)
def test_what_is_no_page_of_an_engine(text: str) -> None:
    with pytest.raises(d.DecompositionError, match="somewhere: "):
        d.read_metrics(text, "somewhere")


def costs(requests: int, sum_s: float) -> d.Costs:
    return d.Costs(requests, dict.fromkeys(d.STAGES, 0.0) | {"producer: sum": sum_s}, 10.0 * requests, 2.0 * requests)


def test_costs_add_up() -> None:
    total = costs(1, 0.5) + costs(3, 1.5)
    assert total == costs(4, 2.0)
    assert total.per_request["producer: sum"] == 0.5
    assert total.payload_bytes_per_request == 10
    assert d.Costs().per_request == {}


@pytest.mark.parametrize(
    ("low", "high", "agrees", "says"),
    [
        (0.001, 0.003, True, "lies within"),
        (0.002, 0.003, True, "lies within"),
        (0.0025, 0.003, False, "larger by 0.5 ms"),
        (-0.001, 0.0015, False, "smaller by 0.5 ms"),
    ],
)
def test_what_explains_a_difference(low: float, high: float, agrees: bool, says: str) -> None:
    found = d.explain(costs(4, 0.0), costs(2, 0.004), low, high)
    assert found.explained_s == pytest.approx(0.002)
    assert found.payload_bytes == 0
    assert found.agrees is agrees
    assert says in found.sentence()


def test_an_arm_without_requests_explains_nothing() -> None:
    with pytest.raises(ValueError, match="both must be some"):
        d.explain(d.Costs(), costs(1, 1.0), 0, 1)


def test_an_engine_that_was_started_again() -> None:
    high, low = d.read_metrics(PAGE, "x"), d.read_metrics(PAGE.replace("1.5", "0.5"), "x")
    with pytest.raises(d.DecompositionError, match="started again"):
        d.costs({d.PRODUCER: high, d.CONSUMER: high}, {d.PRODUCER: low, d.CONSUMER: high}, 1)


@pytest.mark.parametrize("status", [200, 404])
def test_reading_both_engines(status: int) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(status, text=PAGE)

    async def read() -> dict[str, d.Reading]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await d.read_engines(client, {"producer": "http://p/", "consumer": "http://d"})

    if status == 200:
        assert asyncio.run(read()) == {name: d.read_metrics(PAGE, "x") for name in ("producer", "consumer")}
    else:
        with pytest.raises(d.DecompositionError, match="/metrics: cannot be read"):
            asyncio.run(read())
    assert set(asked) == {"http://p/metrics", "http://d/metrics"}
