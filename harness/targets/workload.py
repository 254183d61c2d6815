"""A cell's prompts and engine configurations: the same on every target."""

from __future__ import annotations

import random

from engine.config import EngineConfig, preset
from engine.proxy import Prompt
from engine.tokenizer import BOS
from harness.plan import Cell
from scenarios.schema import Scenario
from scenarios.topology import EngineTopology

LEASE_TICKS = 10**9  # in a clean run no lease ends by itself
PRODUCER, CONSUMER, PROXY = "producer", "consumer", "proxy"


def request_id(load: int) -> str:
    """The id of the request that scenarios call load n (from 1)."""
    return f"r{load}"


def make_prompts(scenario: Scenario, data_seed: int) -> tuple[Prompt, ...]:
    """The workload's prompts: random bytes, lengths within `prompt_tokens`, after a shared prefix if there is one.

    With `identical_prompts` all are the first.
    """
    workload = scenario.workload
    rng = random.Random(data_seed)
    prefix = [rng.randrange(BOS) for _ in range(workload.shared_prefix_tokens)]
    prompts: list[Prompt] = []
    for load in range(1, workload.requests + 1):
        length = rng.randint(*workload.prompt_tokens)
        own = [rng.randrange(BOS) for _ in range(length - len(prefix))]
        tokens = prompts[0].token_ids if workload.identical_prompts and prompts else (*prefix, *own)
        prompts.append(Prompt(request_id(load), tokens, workload.output_tokens))
    return tuple(prompts)


def make_competitors(scenario: Scenario, rng: random.Random, producer: EngineConfig) -> list[Prompt]:
    """The workload's competitors: prefills that fill the producer's whole pool."""
    length = producer.context_limit - 1
    return [
        Prompt(f"c{n}", tuple(rng.randrange(BOS) for _ in range(length)), 1)
        for n in range(1, scenario.workload.competitors + 1)
    ]


def engine_config(cell: Cell, engine_id: str, side: EngineTopology) -> EngineConfig:
    """The configuration of one side of a cell."""
    topology = cell.scenario.topology
    return EngineConfig(
        engine_id=engine_id,
        model=preset(topology.model),
        seed=cell.data_seed,
        block_size=side.block_size,
        num_blocks=side.num_blocks,
        layout=side.layout,
        kv_dtype=topology.kv_dtype,
        max_model_len=side.max_model_len,
        max_batched_tokens=side.max_batched_tokens,
        max_num_seqs=side.max_num_seqs,
        steps_in_flight=side.steps_in_flight,
        prefix_caching=side.prefix_caching,
        lease_ticks=LEASE_TICKS,
        tp_size=side.tp,
        pp_size=side.pp,
        kernel_block_splits=side.kernel_block_splits,
        dcp_size=side.dcp,
        pcp_size=side.pcp,
        collects_all_stages=side.collects_all_stages,
        speculator=side.speculator,
        draft_tokens=side.draft_tokens,
        checksums_after_speculator=side.checksums_after_speculator,
        checksum=cell.scenario.checksum.apply(cell.policy.settings(cell.scenario.load_failure)),
    )
