"""Checks of what no scenario varies: when sums are taken, who may do without, and which blocks a load brings."""

from __future__ import annotations

from engine.checksum.policy import TRIGGERS, ChecksumSettings, Trigger
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.fabric import Fabric
from engine.connectors.pull import PULL
from engine.core import EngineCore, pull_engine
from engine.errors import RequestError
from engine.request import Request
from engine.seams import Seams
from harness.conformance.exact import exact_blocks_trouble
from harness.conformance.pair import make_prompt
from harness.mutants.bench import Bench

PROMPT_TOKENS, MAX_STEPS = 60, 200


def pull_loads_exactly_its_blocks(bench: Bench) -> str | None:
    """Neither a block more nor one fewer, with and without a prefix that D holds (BLK-5)."""
    for prefix_hit in (False, True):
        trouble = exact_blocks_trouble(PULL, prefix_hit=prefix_hit)
        if trouble is not None:
            return trouble
    return None


def each_trigger_sends_the_same_sums(bench: Bench) -> str | None:
    """A pool of one prompt: each takes the blocks whose sums were kept of the one before (EXT-8)."""
    sent = {trigger: _sent(trigger, bench.seed) for trigger in TRIGGERS}
    other = [trigger for trigger in TRIGGERS if sent[trigger] != sent["prompt_end"]]
    return f"other checksums than at the prompt's end: {', '.join(other)}" if other else None


def checksums_are_not_switched_off_by_a_request(bench: Bench) -> str | None:
    """Unless the engine was started with the flag for it (POL-6)."""
    try:
        _producer("prompt_end").add_request(Request("r", [1] * 20, 1, {"do_remote_decode": True}, kv_checksum=False))
    except RequestError:
        return None
    return "a request switched the checksums of an engine off that does not allow it"


def _producer(trigger: Trigger) -> EngineCore:
    settings = ChecksumSettings(kv_checksum_mode="log", kv_checksum_trigger=trigger)
    seams = Seams()
    config = EngineConfig("producer", num_blocks=5, steps_in_flight=1, checksum=settings)
    return pull_engine(config, seams, VirtualClock(), Fabric(seams))


def _sent(trigger: Trigger, seed: int) -> list[object]:
    """What P sends for prompts that have nothing in common, one after the other."""
    engine, texts = _producer(trigger), []
    for number in range(3):
        prompt = make_prompt(PROMPT_TOKENS, seed=seed + number)
        engine.add_request(Request(f"r{number}", list(prompt), 1, {"do_remote_decode": True}))
        finished = next((found for _ in range(MAX_STEPS) if (found := engine.step())), [])
        texts += [(output.kv_transfer_params or {}).get("kv_checksums") for output in finished]
        if engine.connector is not None:
            engine.connector.end_lease(f"r{number}")
    return texts
