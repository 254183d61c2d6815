"""What version 2 adds around the sums: values bound to the prompt (GAP-5), the last block compared as far as both go.

P adds the prompt's binding to every value, D subtracts that of its own prompt. If the checksums are another prompt's,
every compared position differs: a mismatch, for what arrived is then not this request's KV, or cannot be shown to be.
D sums only the tokens that P has summed too, so that a last block that P holds in part is compared (GAP-4).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from engine.checksum.payload import HARDENED, Payload
from engine.checksum.records import GroupBlocks, Merge


def prompt_binding(token_ids: Sequence[int], cache_salt: str = "") -> int:
    """What identifies a prompt: the first 8 bytes, little-endian, of SHA-256.

    Hashed are the length of the salt (UTF-8) in 8 bytes, the salt, and each token id in 4 bytes, little-endian.

    Args:
        token_ids: the tokens that the checksums cover, from the first of the request.
        cache_salt: what keeps its KV apart from others' with the same prompt.
    """
    salt = cache_salt.encode()
    tokens = array("I", token_ids)
    if tokens.itemsize != 4:
        raise RuntimeError(f"an unsigned int has {tokens.itemsize} bytes here, not 4: version 2 cannot be used")
    if sys.byteorder != "little":
        tokens.byteswap()
    digest = hashlib.sha256(len(salt).to_bytes(8, "little") + salt + tokens.tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def bound(payload: Payload, binding: int) -> Payload:
    """P: add the binding to every value, modulo 2**64."""
    add = np.uint64(binding % 2**64)
    return replace(payload, groups=tuple(replace(group, values=group.values + add) for group in payload.groups))


def unbound(payload: Payload, prompt_token_ids: Sequence[int]) -> Payload:
    """D: take the binding of its own prompt, as far as P's checksums go, off again; version 1 is left as it is."""
    if payload.version != HARDENED:
        return payload
    return bound(payload, -prompt_binding(prompt_token_ids[: payload.num_tokens]))


def to_sum(groups: Mapping[int, GroupBlocks], version: int, num_tokens: int | None = None) -> Mapping[int, GroupBlocks]:
    """The blocks as workers are to sum them: by this version, and no more than the first num_tokens tokens."""
    if version != HARDENED:
        return groups
    return {
        group_id: replace(
            blocks,
            version=version,
            sum_tokens=None if num_tokens is None else min(num_tokens, blocks.num_tokens),
        )
        for group_id, blocks in groups.items()
    }


def as_summed(merge: Merge) -> Merge:
    """The merged sums with their blocks cut to the tokens that were summed, which is what can be compared."""
    groups = {
        group_id: replace(group, blocks=replace(group.blocks, num_tokens=group.blocks.tokens_to_sum))
        for group_id, group in merge.groups.items()
    }
    return replace(merge, groups=groups)
