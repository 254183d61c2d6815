"""Broken engines: what would let wrong KV pass without any harm, so that a harness could not see it do harm."""

from __future__ import annotations

import torch

from engine.paged import PagedKVCache
from harness.mutants.base import Function, Mutant
from harness.mutants.checks import nothing_in_common_is_unverified

READ = "engine.paged.PagedKVCache.read"


def _zeroes(original: Function) -> Function:
    def read(
        cache: PagedKVCache, layer: int, block_ids: torch.Tensor, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = original(cache, layer, block_ids, context)
        return torch.zeros_like(k), torch.zeros_like(v)

    return read


def _last_only(original: Function) -> Function:
    """Every earlier token's K and V read as zeros."""

    def read(
        cache: PagedKVCache, layer: int, block_ids: torch.Tensor, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = original(cache, layer, block_ids, context)
        k[:-1] = 0
        v[:-1] = 0
        return k, v

    return read


MUTANTS = (
    Mutant(
        name="cache-not-read",
        area="engine",
        what="Attention reads zeros in the place of the paged cache.",
        target=READ,
        replace=_zeroes,
        killers=("clean-transfer", "empty-transfer--off"),
        control=nothing_in_common_is_unverified,
    ),
    Mutant(
        name="earlier-tokens-not-read",
        area="engine",
        what="Attention reads zeros for every token but the last.",
        target=READ,
        replace=_last_only,
        killers=("clean-transfer", "empty-transfer--off"),
        control=nothing_in_common_is_unverified,
    ),
)
