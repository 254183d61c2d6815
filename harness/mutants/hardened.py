"""Broken hardened checksums (version 2): each takes away one thing that it has and version 1 has not.

Both engines are broken alike, so a clean transfer still verifies; what was lost shows where version 1 would be blind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.checksum.payload import HARDENED
from engine.checksum.records import GroupBlocks
from harness.mutants.base import Function, Mutant
from harness.mutants.checks import (
    hardened_sums_are_those_of_their_definition,
    the_last_block_is_compared_as_far_as_both_go,
)
from harness.mutants.checksum import BLOCK_CHECKSUMS, Layers, Sums
from kernels import torch_path_v2
from kernels.definition_v2 import GAMMA
from kernels.torch_path_v2 import signed

CLEAN = "hardened-clean-transfer--fail_closed_fail"


def _only_version_2(broken: Callable[[Sums], Sums]) -> Callable[[Sums], Sums]:
    """Sums of version 1 stay as they are."""

    def make(original: Sums) -> Sums:
        mutated = broken(original)

        def block_checksums(*args: Any, version: int = 1, **how: Any) -> torch.Tensor:
            chosen = mutated if version == HARDENED else original
            return chosen(*args, version=version, **how)

        return block_checksums

    return make


def _not_mixed(original: Sums) -> Sums:
    """`sum x ^ key`."""

    def block_checksums(
        layers: Layers, ids: Sequence[int], *, block_size: int, start: int, num_tokens: int, **how: Any
    ) -> torch.Tensor:
        sums = torch.zeros(len(ids), dtype=torch.int64)
        for layer in layers:
            kv = torch.cat([part[list(ids)].contiguous().view(torch.int64) for part in layer.parts], dim=3)
            token = torch.arange(len(ids) * block_size).view(len(ids), block_size) + start * block_size
            j = token[:, :, None] * kv.shape[3] + torch.arange(kv.shape[3])
            rows = torch_path_v2.row_keys(layer.layer_number, layer.first_head, kv.shape[2], kv.device)
            terms = kv ^ (rows[:, None] + j[:, :, None] * signed(GAMMA))
            sums += (terms * (token < num_tokens)[:, :, None, None]).sum((1, 2, 3))
        return sums

    return block_checksums


def _linear(original: Sums) -> Sums:
    return lambda *args, **how: original(*args, **how | {"version": 1})


def _one_key_a_layer(original: Sums) -> Sums:
    """Each head as if it were the first one."""

    def block_checksums(layers: Layers, ids: Sequence[int], **how: Any) -> torch.Tensor:
        heads = [
            replace(layer, first_head=0, parts=tuple(part[:, :, head : head + 1] for part in layer.parts))
            for layer in layers
            for head in range(layer.parts[0].shape[2])
        ]
        return torch.stack([original([head], ids, **how) for head in heads]).sum(0)

    return block_checksums


def _check_of_nothing(original: Function) -> Function:
    return lambda fields: bytes(8)


def _no_binding(original: Function) -> Function:
    return lambda token_ids, cache_salt="": 0


def _all_of_its_own(original: Function) -> Function:
    """D sums all its tokens, also those that P has not."""

    def to_sum(
        groups: Mapping[int, GroupBlocks], version: int, num_tokens: int | None = None
    ) -> Mapping[int, GroupBlocks]:
        result: Mapping[int, GroupBlocks] = original(groups, version)
        return result

    return to_sum


MUTANTS = (
    Mutant(
        name="hardened-not-mixed",
        area="checksum",
        what="Version 2 adds up pieces and keys without mixing them.",
        target=BLOCK_CHECKSUMS,
        replace=_only_version_2(_not_mixed),
        killers=("hardened-bit63-twice",),
        control=CLEAN,
    ),
    Mutant(
        name="hardened-is-linear",
        area="checksum",
        what="Version 2 sums as version 1 does.",
        target=BLOCK_CHECKSUMS,
        replace=_only_version_2(_linear),
        killers=("hardened-bit63-twice", "hardened-equal-factors-exchanged", "hardened-linear-cancellation"),
        control=CLEAN,
    ),
    Mutant(
        name="hardened-heads-alike",
        area="checksum",
        what="The KV head is not in the keys of version 2.",
        target=BLOCK_CHECKSUMS,
        replace=_only_version_2(_one_key_a_layer),
        killers=(hardened_sums_are_those_of_their_definition,),
        control=CLEAN,
    ),
    Mutant(
        name="hardened-check-of-nothing",
        area="verifier",
        what="The check that version 2's payload ends with does not depend on its fields.",
        target="engine.checksum.payload._check",
        replace=_check_of_nothing,
        killers=("hardened-payload-value-altered", "hardened-payload-tp-size-altered"),
        control=CLEAN,
    ),
    Mutant(
        name="hardened-not-bound",
        area="verifier",
        what="Version 2's values are not bound to the prompt.",
        target="engine.checksum.hardened.prompt_binding",
        replace=_no_binding,
        killers=("hardened-params-swapped",),
        control=CLEAN,
    ),
    Mutant(
        name="hardened-sums-all-of-its-own",
        area="verifier",
        what="Under version 2, D sums tokens of the last block that P has not.",
        target="engine.checksum.hardened.to_sum",
        replace=_all_of_its_own,
        killers=(the_last_block_is_compared_as_far_as_both_go,),
        control=CLEAN,
    ),
)
