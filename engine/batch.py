"""The tokens that one step computes, as tensors that every rank shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step, request after request.

    Attributes:
        token_ids, positions: int64 [tokens].
        block_ids, slots: int64 [tokens], where the KV of each token goes.
        tables: the block table of each request, int64 [blocks].
    """

    requests: tuple[ScheduledRequest, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor
    slots: torch.Tensor
    tables: tuple[torch.Tensor, ...]

    def shares(self) -> Iterator[tuple[ScheduledRequest, slice, torch.Tensor]]:
        """Each request with its rows in the batch and its block table."""
        row = 0
        for request, table in zip(self.requests, self.tables, strict=True):
            yield request, slice(row, row + request.num_tokens), table
            row += request.num_tokens


def make_batch(
    requests: Sequence[ScheduledRequest], tokens: Mapping[str, Sequence[int]], block_size: int, device: str
) -> Batch:
    """Put the shares of a step together; `tokens` are those of each request in this step."""
    positions: list[int] = []
    blocks: list[int] = []
    for request in requests:
        span = range(request.first_position, request.first_position + request.num_tokens)
        positions += span
        blocks += [request.block_ids[position // block_size] for position in span]

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    where = tensor(positions)
    return Batch(
        requests=tuple(requests),
        token_ids=tensor([token for request in requests for token in tokens[request.request_id]]),
        positions=where,
        block_ids=tensor(blocks),
        slots=where % block_size,
        tables=tuple(tensor(request.block_ids) for request in requests),
    )
