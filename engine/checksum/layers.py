"""Which of a group's caches can be checksummed, and under which factor each counts (DEF-4, FPR-2, FPR-3, EXT-9)."""

from __future__ import annotations

from collections import Counter

from engine.checksum.payload import fingerprint, layer_number
from engine.checksum.policy import ChecksumSettings
from engine.groups import CacheRow, KVGroup
from kernels.definition import MAX_KV_HEADS_PER_LAYER, PIECE_BYTES

_NO_NUMBER = -1


def factors(group: KVGroup) -> tuple[tuple[int, int], ...]:
    """Per cache its layer number, and the number of its first head in the factor of a slice (DEF-4).

    A cache that layers share counts once, under the lowest of their numbers (FPR-3). Heads of a layer's second cache
    are numbered after those of its first (EXT-9, ours). A layer without one number has -1.
    """
    seen: Counter[int] = Counter()
    found = []
    for row in group.rows:
        number = _number(row)
        found.append((number, seen[number] * group.num_heads))
        seen[number] += 1
    return tuple(found)


def rows_fingerprint(group: KVGroup, rows: list[int], kv_dtype: str) -> int:
    """Identify the layers that use these caches of a group (FPR-1)."""
    names = (name for row in rows for name in group.rows[row].names)
    return fingerprint((name, group.spec_type, kv_dtype) for name in names)


def why_skipped(
    group: KVGroup, tp_size: int, kernel_block_tokens: tuple[int, int], itemsize: int, settings: ChecksumSettings
) -> str | None:
    """Why a worker cannot checksum a group; None: it can (FPR-2).

    Args:
        kernel_block_tokens: tokens of a block, and of a kernel block in it.
        itemsize: bytes of an element.
    """
    block, kernel_block = kernel_block_tokens
    caches = Counter(number for number, _ in factors(group))
    num_heads = group.num_heads * max(caches.values())
    problems = {
        "its layers have no KV blocks of tokens, and EXT-5 is off": group.is_state and not settings.checksum_states,
        f"it is compressed: a state for {group.tokens_per_state} tokens": group.tokens_per_state != 1,
        "its KV heads are packed into head slots": group.packed_heads,
        "it is host-resident": group.host_resident,
        f"a token's {group.width * itemsize} bytes are not whole {PIECE_BYTES}-byte pieces": (
            group.width * itemsize % PIECE_BYTES
        ),
        f"kernel blocks of {kernel_block} tokens do not tile blocks of {block}": block % kernel_block,
        "a layer's name holds no single layer number": _NO_NUMBER in caches,
        "two caches have one layer number, and EXT-9 is off": num_heads > group.num_heads
        and not settings.several_caches,
        f"it is not known which of {tp_size} ranks hold which of {group.num_heads} heads": (
            group.num_heads % tp_size and tp_size % group.num_heads
        ),
        f"{num_heads} KV heads are more than {MAX_KV_HEADS_PER_LAYER}": num_heads > MAX_KV_HEADS_PER_LAYER,
    }
    return next((problem for problem, found in problems.items() if found), None)


def _number(row: CacheRow) -> int:
    numbers = [layer_number(name) for name in row.names]
    return min((_NO_NUMBER if number is None else number for number in numbers), default=_NO_NUMBER)
