"""The pool against a plain model of it: references, the order of the free queue, and the prefix cache."""

import random

import pytest

from engine.blocks import NULL_BLOCK, BlockPool, DoubleFreeError, block_hashes
from engine.errors import KVChaosError


def test_a_new_pool_has_every_block_but_the_null_block():
    pool = BlockPool(5)
    assert pool.num_free == 4
    taken = pool.allocate(4)
    assert taken == [1, 2, 3, 4]
    assert NULL_BLOCK not in taken
    assert not pool.can_allocate(1)
    assert pool.can_allocate(0)


def test_more_than_is_free_is_refused_and_nothing_is_taken():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_the_block_that_was_free_longest_goes_first_and_the_end_of_a_prefix_before_its_start():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(5) == [5, 4, 3, 2, 1]


def test_a_double_free_is_an_error():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(DoubleFreeError, match="block 1 is freed"):
        pool.free(blocks)
    assert issubclass(DoubleFreeError, KVChaosError)
    assert pool.num_free == 3


def test_a_shared_block_is_free_when_the_last_reference_is_given_back():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert (pool.references(block), pool.num_free) == (1, 2)
    pool.free([block])
    assert (pool.references(block), pool.num_free) == (0, 3)


def test_a_free_block_stays_cached_until_it_is_allocated():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    hashes = [b"one", b"two"]
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.cache(block, block_hash)
    pool.free(blocks)
    assert pool.lookup(hashes) == blocks
    pool.share(pool.lookup(hashes))
    assert (pool.num_free, pool.references(blocks[0])) == (1, 1)
    pool.free(blocks)
    taken = pool.allocate(2)  # block 3 was free longer, then the end of the prefix
    assert taken == [3, blocks[1]]
    assert pool.lookup(hashes) == [blocks[0]]
    assert pool.is_cached(blocks[0])
    assert not pool.is_cached(blocks[1])


def test_lookup_ends_with_the_first_block_that_is_missing():
    pool = BlockPool(4)
    for block, block_hash in zip(pool.allocate(2), [b"one", b"three"], strict=True):
        pool.cache(block, block_hash)
    assert pool.lookup([b"one", b"two", b"three"]) == [1]
    assert pool.lookup([b"two"]) == []


def test_the_first_block_of_a_hash_wins_and_keeps_its_hash():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache(first, b"one")
    pool.cache(second, b"one")
    pool.cache(first, b"two")
    assert pool.lookup([b"one"]) == [first]
    assert pool.lookup([b"two"]) == []
    assert not pool.is_cached(second)


def test_hashes_cover_full_blocks_and_all_before_them():
    tokens = list(range(40))
    hashes = block_hashes(tokens, 16)
    assert len(hashes) == 2
    assert block_hashes(tokens[:32], 16) == hashes
    assert block_hashes(tokens[:31], 16) == hashes[:1]
    assert block_hashes([], 16) == []
    changed = block_hashes([99, *tokens[1:]], 16)
    assert changed[0] != hashes[0]
    assert changed[1] != hashes[1], "equal tokens after another prefix are another block"
    assert len(set(hashes)) == 2


def test_hashes_tell_tokens_apart_that_read_alike():
    assert block_hashes([1, 23], 2) != block_hashes([12, 3], 2)


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_keeps_the_books(seed):
    """Against a list of holders; what is looked up was cached and not allocated since."""
    rng = random.Random(seed)
    pool = BlockPool(9)
    held = []
    cached = {}
    for step in range(300):
        action = rng.choice(["allocate", "free", "share", "cache"])
        if action == "allocate" and pool.can_allocate(count := rng.randint(1, 3)):
            blocks = pool.allocate(count)
            assert not {b for other in held for b in other} & set(blocks)
            cached = {h: b for h, b in cached.items() if b not in blocks}
            held.append(blocks)
        elif action == "free" and held:
            pool.free(held.pop(rng.randrange(len(held))))
        elif action == "share" and cached:
            block = pool.lookup([rng.choice(sorted(cached))])
            pool.share(block)
            held.append(block)
        elif action == "cache" and held:
            block = rng.choice(held)[0]
            if block not in cached.values():
                name = str(step).encode()
                pool.cache(block, name)
                cached[name] = block
        counts = {b: sum(blocks.count(b) for blocks in held) for b in range(1, 9)}
        assert {b: pool.references(b) for b in range(1, 9)} == counts
        assert pool.num_free == sum(count == 0 for count in counts.values())
        assert {h: pool.lookup([h]) for h in cached} == {h: [b] for h, b in cached.items()}
