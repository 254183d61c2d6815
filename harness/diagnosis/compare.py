"""P's and D's KV side by side: which rows differ, and a hash of every row, by which moved rows are found.

A row is what one token has of one layer, one head, and K or V: half of its bytes there. Everything a hypothesis says
about moves is said about rows. Two different rows have the same hash with a chance of 2**-64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.diagnosis.model import KVBlocks

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Row = tuple[int, int, int, int]  # layer, head, K or V, compared token

PARTS = ("K", "V")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The tokens that both P and D hold. T of them; S tokens in all sources: P first, then the others.

    Attributes:
        producer, consumer, others: as given.
        first: position in the request of the first compared token.
        wrong: bool [L, H, 2, T]: the row differs.
        wrong_bytes: int64 [L, H, 2, T]: how many of its bytes do.
        ids: uint64 [L, H, 2, T]: hashes of D's rows.
        table: uint64 [L, H, 2, S]: hashes of the rows of every source.
        source_of: int64 [S]: 0 for P, 1 for the first of the others.
        token_of: int64 [S]: position in its request.
    """

    producer: KVBlocks
    consumer: KVBlocks
    others: Mapping[str, KVBlocks]
    first: int
    wrong: Mask
    wrong_bytes: Ints
    ids: Ids
    table: Ids
    source_of: Ints
    token_of: Ints

    @property
    def num_tokens(self) -> int:
        return int(self.wrong.shape[3])

    @property
    def half(self) -> int:
        """Bytes a row."""
        return int(self.consumer.kv.shape[3]) // 2

    @property
    def holds_16_bits(self) -> bool:
        """Whether rows are whole numbers of 16 bits."""
        return self.consumer.element_bytes == 2 and self.half % 2 == 0

    @cached_property
    def total(self) -> int:
        """Differing bytes."""
        return int(self.wrong_bytes.sum())

    @cached_property
    def tokens(self) -> Ints:
        """Positions of the compared tokens."""
        return np.arange(self.first, self.first + self.num_tokens)

    @property
    def own_ids(self) -> Ids:
        """uint64 [L, H, 2, T]: hashes of P's rows."""
        start = self.first - self.producer.first_token
        return self.table[..., start : start + self.num_tokens]

    @property
    def grids(self) -> tuple[int, ...]:
        """Block sizes, D's first."""
        return tuple(dict.fromkeys((self.consumer.block_size, self.producer.block_size)))

    @property
    def source_names(self) -> tuple[str, ...]:
        return ("", *self.others)

    @cached_property
    def sources(self) -> tuple[KVBlocks, ...]:
        return (self.producer, *self.others.values())

    def own_index(self, tokens: Ints) -> Ints:
        """Where P's tokens at these positions stand in the table; -1: P does not hold them."""
        index = tokens - self.producer.first_token
        return np.where((index >= 0) & (index < self.producer.kv.shape[2]), index, -1)

    def bytes_of(self, weights: Mask) -> int:
        """Differing bytes in these rows."""
        return int(self.wrong_bytes[weights].sum())

    def consumer_rows(self, rows: Mask) -> Bytes:
        """D's bytes of these rows, in order: uint8 [n, half]."""
        return _picked(_split(self.consumer, self.first, self.num_tokens), rows)

    def consumer_layer(self, layer: int, mask: Mask) -> Bytes:
        """D's bytes of these rows of a layer, bool [H, 2, T], or of these tokens, bool [H, 1, T]: K, then V."""
        head, part, token = np.nonzero(mask)
        if mask.shape[1] == 1:
            return np.asarray(self.consumer.kv[layer, head, token + self.first - self.consumer.first_token])
        return np.asarray(_split(self.consumer, self.first, self.num_tokens)[layer, head, token, part])

    def producer_rows(self, rows: Mask) -> Bytes:
        """P's bytes of these rows, in order: uint8 [n, half]."""
        return _picked(_split(self.producer, self.first, self.num_tokens), rows)

    def source_row(self, layer: int, head: int, part: int, index: int) -> Bytes:
        """The bytes of one row of the table: uint8 [half]."""
        source, token = self.sources[self.source_of[index]], int(self.token_of[index])
        data = source.kv[layer, head, token - source.first_token]
        row: Bytes = data[part * self.half : (part + 1) * self.half]
        return row


def compare(producer: KVBlocks, consumer: KVBlocks, others: Mapping[str, KVBlocks]) -> Comparison:
    """Compare the tokens that P and D both hold.

    Raises:
        ValueError: they have no token in common, or not the same layers, heads and bytes a token.
    """
    for name, blocks in {"the consumer": consumer, **{f"request {name}": kv for name, kv in others.items()}}.items():
        if _geometry(blocks) != _geometry(producer):
            raise ValueError(
                f"{name} has {_geometry(blocks)} (layers, heads, bytes a token), the producer {_geometry(producer)}"
            )
    first, end = max(producer.first_token, consumer.first_token), min(producer.end, consumer.end)
    if first >= end:
        raise ValueError(
            f"the producer holds tokens {producer.first_token} to {producer.end - 1} and the consumer "
            f"{consumer.first_token} to {consumer.end - 1}: they have none in common"
        )
    p, d = (_split(blocks, first, end - first) for blocks in (producer, consumer))
    wrong, wrong_bytes = _differences(p, d)
    sources = (producer, *others.values())
    table = np.concatenate([_by_row(row_ids(_split(kv, kv.first_token, kv.kv.shape[2]))) for kv in sources], axis=3)
    start = first - producer.first_token
    ids = table[..., start : start + end - first].copy()
    _fill_in(ids, d, wrong)
    return Comparison(
        producer,
        consumer,
        others,
        first,
        wrong,
        wrong_bytes,
        ids,
        table,
        source_of=np.concatenate([np.full(kv.kv.shape[2], number) for number, kv in enumerate(sources)]),
        token_of=np.concatenate([np.arange(kv.first_token, kv.end) for kv in sources]),
    )


def _geometry(blocks: KVBlocks) -> tuple[int, int, int]:
    layers, heads, _, size = blocks.kv.shape
    return layers, heads, size


def _split(blocks: KVBlocks, first: int, tokens: int) -> Bytes:
    """A view [layers, heads, tokens, 2, half] of these tokens."""
    layers, heads, _, size = blocks.kv.shape
    start = first - blocks.first_token
    return blocks.kv[:, :, start : start + tokens].reshape(layers, heads, tokens, 2, size // 2)


def _by_row(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[layers, heads, tokens, 2] to [layers, heads, 2, tokens]."""
    return np.ascontiguousarray(array.transpose(0, 1, 3, 2))


def _picked(split: Bytes, rows: Mask) -> Bytes:
    layer, head, part, token = np.nonzero(rows)
    return split[layer, head, token, part]


def sample_of(rows: Mask, most: int) -> Mask:
    """About this many of these rows, evenly spread."""
    chosen = np.zeros_like(rows)
    found = np.flatnonzero(rows)
    chosen.reshape(-1)[found[:: -(-len(found) // most)]] = True
    return chosen


def as_words(rows: Bytes) -> npt.NDArray[Any]:
    """The same bytes as the widest unsigned words that fill a row: [..., words]."""
    width = next(width for width in (8, 4, 2, 1) if rows.shape[-1] % width == 0)
    return np.ascontiguousarray(rows).view(f"<u{width}")


def row_ids(rows: Bytes) -> Ids:
    """A hash of each row of uint8 [layers, ..., half]: uint64 [layers, ...]."""
    ids = np.empty(rows.shape[:-1], np.uint64)
    for layer, data in enumerate(rows):
        ids[layer] = _hash(as_words(data))
    return ids


def _hash(words: npt.NDArray[Any]) -> Ids:
    weights = np.random.default_rng(0).integers(0, 2**64, words.shape[-1], dtype=np.uint64) | np.uint64(1)
    mixed = words.astype(np.uint64)
    mixed ^= mixed >> np.uint64(32)  # else two words that differ in their highest bits would cancel out
    mixed *= weights
    mixed ^= mixed >> np.uint64(29)
    summed: Ids = mixed.sum(axis=-1, dtype=np.uint64) * np.array(_GOLDEN)
    return summed ^ (summed >> np.uint64(32))


def _differences(p: Bytes, d: Bytes) -> tuple[Mask, Ints]:
    """Which rows differ and in how many bytes, layer by layer: bool and int64 [layers, heads, 2, tokens]."""
    layers, heads, tokens, parts, _ = p.shape
    counts = np.zeros((layers, heads, tokens, parts), np.int64)
    for layer in range(layers):
        differ = (as_words(p[layer]) != as_words(d[layer])).any(axis=-1)
        if differ.any():
            unequal = p[layer][differ] != d[layer][differ]
            counts[layer][differ] = _count(unequal)
    counts = _by_row(counts)
    return counts > 0, counts


def _count(flags: Mask) -> Ints:
    """How many are set in each row of bool [n, half]: by words, as numpy counts bytes slowly."""
    size = flags.shape[1]
    if size % 8 or size > 8 * 255:
        return np.asarray(flags.sum(axis=1))
    lanes = flags.view("<u8").sum(axis=1, dtype=np.uint64)
    pairs = (lanes & np.uint64(0x00FF00FF00FF00FF)) + ((lanes >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    return np.asarray(((pairs * np.array(0x0001000100010001, np.uint64)) >> np.uint64(48)).astype(np.int64))


def _fill_in(ids: Ids, d: Bytes, wrong: Mask) -> None:
    """Replace the hashes of the rows that differ by those of D's bytes."""
    for layer, rows in enumerate(wrong):
        if rows.all():
            ids[layer] = _hash(as_words(d[layer])).transpose(0, 2, 1)
        elif rows.any():
            head, part, token = np.nonzero(rows)
            ids[layer][rows] = _hash(as_words(d[layer][head, token, part]))
