"""A producer and a consumer with one connector, driven by hand: no proxy, one thing after the other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from engine.checksum.policy import ChecksumSettings, LoadFailurePolicy
from engine.clock import VirtualClock
from engine.config import EngineConfig, preset
from engine.connectors.fabric import Fabric
from engine.connectors.registry import ConnectorFactory, transfer_of
from engine.core import EngineCore, connected_engine
from engine.request import Request, RequestOutput
from engine.seams import Seams
from engine.tokenizer import BOS
from harness.conformance.seen import SeenKV

MAX_ROUNDS = 2_000
LEASE_TICKS = 1_000
LOAD_TICKS = 100
NUM_BLOCKS = 32
OUTPUT_TOKENS = 2


def make_prompt(length: int, seed: int = 0, prefix: Sequence[int] = ()) -> tuple[int, ...]:
    """Random byte tokens after a prefix."""
    rng = random.Random(seed)
    return (*prefix, *(rng.randrange(BOS) for _ in range(length - len(prefix))))


class Pair:
    """Checksums are off, so that nothing but the connector stands between a wrong load and its request."""

    def __init__(
        self,
        factory: ConnectorFactory,
        *,
        load_failure: LoadFailurePolicy = "fail",
        prefix_caching: bool = False,
        connected: bool = True,
        producer_model: str = "tiny",
    ) -> None:
        self.clock = VirtualClock()
        self._pushes = transfer_of(factory) == "push"
        self.seams = Seams()
        self.seen = SeenKV()
        self.seen.attach(self.seams)
        self.fabric = Fabric(self.seams)
        settings = ChecksumSettings(kv_load_failure_policy=load_failure)

        def engine(engine_id: str, model: str, fabric: Fabric) -> EngineCore:
            config = EngineConfig(
                engine_id,
                preset(model),
                num_blocks=NUM_BLOCKS,
                prefix_caching=prefix_caching,
                lease_ticks=LEASE_TICKS,
                load_ticks=LOAD_TICKS,
                checksum=settings,
            )
            return connected_engine(factory, config, self.seams, self.clock, fabric)

        self.producer = engine("producer", producer_model, self.fabric if connected else Fabric(self.seams))
        self.consumer = engine("consumer", "tiny", self.fabric)

    def prefill(self, request_id: str, prompt: Sequence[int]) -> dict[str, Any] | None:
        """Compute a prompt on P. Returns what P tells the consumer; None: it said nothing or never answered."""
        self.producer.add_request(Request(request_id, list(prompt), 1, {"do_remote_decode": True}))
        for _ in range(MAX_ROUNDS):
            for output in self.producer.step():
                return None if output.kv_transfer_params is None else dict(output.kv_transfer_params)
        return None

    def load(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any]) -> RequestOutput | None:
        """Serve a prompt on D with P's parameters, and let P hear of it. None: D never answered.

        Raises:
            RequestError: the connector refuses the parameters.
        """
        self.consumer.add_request(Request(request_id, list(prompt), OUTPUT_TOKENS, params))
        answer = None
        for _ in range(MAX_ROUNDS):
            for output in self.consumer.step():
                answer = output
            if self._pushes:
                self.producer.step()
            if answer is not None and not self.consumer.scheduler.has_work and not self.consumer.steps_in_flight:
                return answer
            for land in self.fabric.ready():
                land()
            self.clock.advance()
        return answer

    def settle_producer(self) -> None:
        """Let P take its notices and free what it need not hold any more."""
        for _ in range(MAX_ROUNDS):
            if not self.producer.step() and not self.producer.steps_in_flight:
                return

    def held(self, engine: EngineCore) -> int:
        """Blocks of an engine that are not in its pool."""
        return engine.config.num_blocks - 1 - engine.scheduler.kv.pool.num_free


def tokens_alone(prompt: Sequence[int]) -> tuple[int, ...]:
    """What one engine without P/D answers to a prompt."""
    engine = EngineCore(EngineConfig("alone", prefix_caching=False))
    engine.add_request(Request("alone", list(prompt), OUTPUT_TOKENS))
    while True:
        for output in engine.step():
            return output.token_ids
