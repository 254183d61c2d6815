"""KV bytes that an engine in another process held at one moment, with the methods of `engine.cache.KVMemory` that
oracles call. It cannot be written, since the engine has gone on, but a later snapshot can take its place.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.checksum.records import GroupBlocks


@dataclass(frozen=True, slots=True)
class Spec:
    """What oracles ask of a group: attention over all tokens."""

    element_bytes: int
    is_state: bool = False
    window: int | None = None


class SnapshotMemory:
    """The blocks of one request. `kv`: uint8 [layers, heads, slots, bytes_per_token], slots of all blocks in order."""

    group_id = 0
    num_parts = 2  # a token's bytes are its K bytes and its V bytes
    num_replicas = 1

    def __init__(
        self, blocks: GroupBlocks, kv: npt.NDArray[np.uint8], layer_numbers: tuple[int, ...], element_bytes: int = 4
    ) -> None:
        self._blocks = blocks
        self._kv = kv
        self.spec = Spec(element_bytes)
        self.block_size = blocks.block_size
        self.num_layers, self.num_kv_heads, _, self.bytes_per_token = kv.shape
        self.factors = tuple((number, 0) for number in layer_numbers)

    @property
    def replicas(self) -> list[SnapshotMemory]:
        return [self]

    def group(self, group_id: int) -> SnapshotMemory:
        """Raises ValueError for a group that it does not have."""
        if group_id != 0:
            raise ValueError(f"group {group_id}: only engines with one KV cache group are judged here")
        return self

    def update(self, later: SnapshotMemory) -> None:
        """The same blocks hold other bytes by now."""
        self._kv = later._kv

    def tokens(self, blocks: GroupBlocks) -> npt.NDArray[np.uint8]:
        """The valid tokens: uint8 [layers, heads, tokens, bytes_per_token]."""
        first = blocks.start * blocks.block_size
        return self.slots(blocks.block_ids)[:, :, : blocks.num_tokens - first]

    def slots(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Every slot of these blocks. Raises ValueError for a block that is not the request's."""
        places = [self._blocks.block_ids.index(block_id) for block_id in block_ids]
        size = self.block_size
        return np.concatenate([self._kv[:, :, place * size : (place + 1) * size] for place in places], axis=2)


def read_snapshot(told: Mapping[str, Any]) -> tuple[GroupBlocks, SnapshotMemory | None]:
    """The blocks of an event, and their bytes if it brings any."""
    blocks = GroupBlocks(0, told["block_size"], told["start"], tuple(told["block_ids"]), told["num_tokens"])
    if "kv" not in told:
        return blocks, None
    raw = np.frombuffer(base64.b64decode(told["kv"]), dtype=np.uint8)
    shape = (told["layers"], told["heads"], len(blocks.block_ids) * blocks.block_size, -1)
    kv = raw.reshape(shape)
    return blocks, SnapshotMemory(blocks, kv, tuple(told["layer_numbers"]), told["element_bytes"])
