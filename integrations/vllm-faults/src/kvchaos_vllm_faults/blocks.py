"""A request's blocks, and the names of the moments in the life of a transfer. The names are those of kvchaos' seams."""

from __future__ import annotations

from dataclasses import dataclass

KV_FINAL = "producer.kv_final"
CHECKSUMMED = "producer.checksummed"
PARAMS_PASS = "proxy.params_pass"
LOAD_SCHEDULED = "consumer.load_scheduled"
READ_POSTED = "transfer.op_posted"
READ_DONE = "transfer.completion"
LOAD_FINISHED = "consumer.load_finished"
LOAD_FAILED = "consumer.load_failed"  # no seam of kvchaos: the connector itself says that a load failed
VERIFIED = "consumer.verified"
FIRST_USE = "consumer.first_use"
RECOMPUTE = "consumer.recompute_start"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of a request, from block position `start` on.

    `num_tokens` counts the tokens of the request that are covered, from its first: the block at position p holds
    `num_tokens - p * block_size` of them, and never more than `block_size`.
    """

    start: int
    block_ids: tuple[int, ...]
    block_size: int
    num_tokens: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.block_ids))

    @property
    def first_token(self) -> int:
        return self.start * self.block_size

    def tokens_at(self, position: int) -> int:
        """How many tokens the block at this position holds."""
        return max(0, min(self.block_size, self.num_tokens - position * self.block_size))

    def to_plain(self) -> dict[str, object]:
        """JSON values."""
        return {
            "start": self.start,
            "block_ids": list(self.block_ids),
            "block_size": self.block_size,
            "num_tokens": self.num_tokens,
        }
