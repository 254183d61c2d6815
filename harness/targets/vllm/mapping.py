"""A scenario in vLLM's sizes, and what of it cannot be said there.

vLLM's own engine decides on layout, dtype and model. Its blocks are larger than those of most scenarios (on a CPU a
multiple of 32 tokens), so everything that is counted in tokens grows by the same factor: a prompt then has as many
blocks as the scenario speaks of, and its last block is as full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.groups import kv_groups
from engine.presets import preset
from faults.base import FaultParams
from scenarios.schema import Scenario
from scenarios.topology import EngineTopology
from scenarios.words import NotCheckedReason, Policy, Truth

HOWS: Mapping[str, tuple[str, ...] | None] = {
    "noop": None,
    "bit_flip": None,
    "drop_checksums": None,
    "early_reuse": None,
    "layout_mismatch": ("hnd_as_nhd",),
    "misplace": (
        "swap_blocks", "shift", "duplicate", "reverse", "other_request", "out_of_range",
        "swap_tokens", "swap_heads", "swap_layers", "swap_kv",
    ),
    "short_transfer": None,
    "swap_params": None,
}  # fmt: skip
"""The faults that there are for vLLM, by kind, and which `how` of them; None: all, or there is no `how`."""

_OWN_OF_VLLM = ("layout", "block_size", "num_blocks", "max_batched_tokens", "max_num_seqs", "steps_in_flight")
"""Fields of a side that are the engine's own business here, or are mapped."""
_MAX_NUM_BLOCKS = 64  # of the scenarios' default pool: vLLM's has more


def in_blocks_of(scenario: Scenario, block_size: int) -> Scenario:
    """The scenario with blocks of so many tokens on both sides, which must have one block size."""
    topology = scenario.topology
    factor = block_size / topology.producer.block_size
    workload = scenario.workload
    sides = {
        name: getattr(topology, name).model_copy(update={"block_size": block_size, "layout": "HND"})
        for name in ("producer", "consumer")
    }
    first, last = workload.prompt_tokens
    return scenario.model_copy(
        update={
            "topology": topology.model_copy(update=sides),
            "workload": workload.model_copy(
                update={
                    "prompt_tokens": (_scaled(first, factor), _scaled(last, factor)),
                    "shared_prefix_tokens": _scaled(workload.shared_prefix_tokens, factor),
                }
            ),
            "faults": tuple(_scaled_fault(params, factor) for params in scenario.faults),
        }
    )


def lacking(scenario: Scenario, policy: Policy) -> Iterator[str]:
    """What the scenario names and vLLM, or this way of running it, has not: in the words of a reason."""
    topology, workload, expected = scenario.topology, scenario.workload, scenario.expect[policy]
    if expected.reason is NotCheckedReason.LOAD_FAILED and expected.truth is Truth.INTACT:
        # Nothing was delivered, so that what is read afterwards is all that could be intact.
        yield "oracle of attention reads"
    if topology.producer.block_size != topology.consumer.block_size:
        yield "topology.block_size that differs between the sides"
    for name in ("producer", "consumer"):
        yield from _lacking_side(name, getattr(topology, name))
    first, *others = kv_groups(preset(topology.model))
    if others or first.num_parts != 2 or first.is_state or first.window is not None:
        yield f"topology.model {topology.model} (the engine has its own, with K and V of every token in one group)"
    if scenario.checksum.version != 1:
        yield f"checksum.version {scenario.checksum.version}"
    if workload.competitors > 1:
        yield "more than one competitor"
    for params in scenario.faults:
        yield from _lacking_fault(params)


def _lacking_side(name: str, side: EngineTopology) -> Iterator[str]:
    given = side.model_dump(exclude_defaults=True)
    for field in sorted(given.keys() - set(_OWN_OF_VLLM)):
        yield f"topology.{name}.{field} {given[field]}"
    if side.num_blocks > _MAX_NUM_BLOCKS:
        yield f"topology.{name}.num_blocks {side.num_blocks}"


def _lacking_fault(params: FaultParams) -> Iterator[str]:
    if params.kind not in HOWS:
        yield f"fault kind {params.kind}"
        return
    hows, how = HOWS[params.kind], getattr(params, "how", None)
    if hows is not None and how not in hows:
        yield f"fault {params.kind} with how: {how}"
    group = getattr(params, "group", 0)
    if group:
        yield f"fault {params.kind} in group {group}"
    if getattr(params, "replica", None) is not None:
        yield f"fault {params.kind} in one replica"


def outside(params: FaultParams, about: Mapping[str, Any]) -> Iterator[str]:
    """Places that a fault names and that the engine's cache, as it tells `about` it, does not have."""
    sizes = {"layer": "num_layers", "head": "num_heads", "byte": "bytes_per_token"}
    for name, size in sizes.items():
        given = getattr(params, name, None)
        if given is not None and given >= about[size]:
            yield f"{name} {given} (there are {about[size]})"


def order_params(params: FaultParams) -> dict[str, Any]:
    """What the fault's order says beside kind, request and moment, as JSON values."""
    return {k: v for k, v in params.model_dump(mode="json").items() if k not in ("kind", "when") and v is not None}


def _scaled(tokens: int, factor: float) -> int:
    return int(tokens * factor)


def _scaled_fault(params: FaultParams, factor: float) -> FaultParams:
    """A token that a fault names stays in its block."""
    token = getattr(params, "token", None)
    return params if token is None else params.model_copy(update={"token": _scaled(token, factor)})
