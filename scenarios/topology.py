"""The pair of engines that a scenario runs on, and the name that reports and seeds know it by."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from engine.config import KERNEL_BLOCK_SPLITS, tokens_held
from engine.groups import kv_groups
from engine.presets import PARALLEL_SIZES, preset
from scenarios.fields import STRICT, ModelName, one_of

BLOCK_SIZES = (8, 16, 32, 64)
"""Each divides every larger one, so that any two sides can be compared (DEF-6)."""

_SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}


class EngineTopology(BaseModel):
    """One engine. Sizes in tokens, except `num_blocks` (one of which is the null block)."""

    model_config = STRICT

    tp: Annotated[int, one_of(*PARALLEL_SIZES)] = 1
    pp: Annotated[int, one_of(*PARALLEL_SIZES)] = 1
    block_size: Annotated[int, one_of(*BLOCK_SIZES)] = 16
    layout: Literal["HND", "NHD"] = "HND"
    kernel_block_splits: Annotated[int, one_of(*KERNEL_BLOCK_SPLITS)] = 1
    num_blocks: Annotated[int, Field(ge=4, le=4096)] = 64
    max_batched_tokens: Annotated[int, Field(ge=8)] = 64
    max_num_seqs: Annotated[int, Field(ge=1)] = 8
    steps_in_flight: Annotated[int, Field(ge=1, le=4)] = 2
    prefix_caching: bool = True
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    dcp: Annotated[int, Field(ge=1, le=8)] = 1
    pcp: Annotated[int, Field(ge=1, le=8)] = 1
    collects_all_stages: bool = True
    speculator: Literal["repeat_last", "ngram"] | None = None
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    checksums_after_speculator: bool = True

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def label(self) -> str:
        ranks = f"tp{self.tp},pp{self.pp}," if self.num_ranks > 1 else ""
        return f"{ranks}{self.layout},bs{self.block_size}"


class Topology(BaseModel):
    """Producer and consumer, the model they share, and who moves the KV."""

    model_config = STRICT

    producer: EngineTopology = EngineTopology()
    consumer: EngineTopology = EngineTopology()
    model: ModelName = "tiny"
    kv_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    transfer: Literal["pull", "push"] = "pull"
    connector: Literal["offload", "offload_pull", "pull_offload"] | None = None

    def capacity(self, side: EngineTopology) -> int:
        """Tokens of one request that the pool of a side holds."""
        return tokens_held(preset(self.model), side.num_blocks, side.block_size)

    def blocks_for(self, side: EngineTopology, num_tokens: int) -> int:
        """Blocks that the pool of a side needs for a request of so many tokens."""
        groups = kv_groups(preset(self.model))
        return 1 + sum(1 if group.is_state else -(-num_tokens // side.block_size) for group in groups)

    @property
    def needs_one_process(self) -> bool:
        """Whether an engine has several ranks, blocks in pieces, or more than K and V: not every target has those."""
        first, *others = kv_groups(preset(self.model))
        sides = self.producer, self.consumer
        plain = not others and first.num_parts == 2 and not first.is_state
        return not plain or any(side.num_ranks > 1 or side.kernel_block_splits > 1 for side in sides)

    @property
    def id(self) -> str:
        """Such as `p[HND,bs16]-d[NHD,bs16]-tiny-bf16-pull`; differs whenever any field differs.

        Fields without a place in the label follow as a hash of those that are not the default, so that a new field
        with a default leaves the ids of old scenarios (and with them their cells' seeds) as they were.
        """
        parts = [f"p[{self.producer.label}]", f"d[{self.consumer.label}]"]
        parts += [self.model, _SHORT_DTYPE[self.kv_dtype], self.transfer]
        if unusual := self._unusual():
            text = json.dumps(unusual, sort_keys=True, separators=(",", ":"))
            parts.append(hashlib.sha256(text.encode()).hexdigest()[:8])
        return "-".join(parts)

    def _unusual(self) -> dict[str, Any]:
        """Fields that the label does not show and that are not the default, by name."""
        shown = {"layout", "block_size", "tp", "pp"}
        found: dict[str, Any] = {} if self.connector is None else {"connector": self.connector}
        for side in ("producer", "consumer"):
            for name, value in getattr(self, side).model_dump(mode="json", exclude_defaults=True).items():
                if name not in shown:
                    found[f"{side}.{name}"] = value
        return found
