"""The tokens that one step computes, as tensors that every rank shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """Where the KV of a step's tokens goes in one group, int64 [tokens], and each request's table, int64 [blocks]."""

    block_ids: torch.Tensor
    slots: torch.Tensor
    tables: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step, request after request. `token_ids` and `positions` are int64 [tokens].

    `groups` has no places for a group of recurrent states, whose blocks hold no tokens.
    """

    requests: tuple[ScheduledRequest, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: Mapping[int, GroupPlaces]

    def shares(self) -> Iterator[tuple[int, ScheduledRequest, slice]]:
        """Each request with its number and its rows in the batch."""
        row = 0
        for number, request in enumerate(self.requests):
            yield number, request, slice(row, row + request.num_tokens)
            row += request.num_tokens


def make_batch(
    requests: Sequence[ScheduledRequest],
    tokens: Mapping[str, Sequence[int]],
    block_size: int,
    groups: Sequence[int],
    device: str,
) -> Batch:
    """Put the shares of a step together: `tokens` of each request in it, and the `groups` that hold KV of tokens."""

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    spans = [range(request.first_position, request.first_position + request.num_tokens) for request in requests]
    positions = tensor([position for span in spans for position in span])
    slots = positions % block_size
    places = {
        group: GroupPlaces(
            tensor(
                [
                    request.tables[group][position // block_size]
                    for request, span in zip(requests, spans, strict=True)
                    for position in span
                ]
            ),
            slots,
            tuple(tensor(request.tables[group]) for request in requests),
        )
        for group in groups
    }
    token_ids = tensor([token for request in requests for token in tokens[request.request_id]])
    return Batch(tuple(requests), token_ids, positions, places)
