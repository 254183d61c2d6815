"""Every (TP, PP) of both sides with every layout, block size, kernel block and a prefix hit: the nightly runs this.

`make test` has each pair of worlds at one layout, and the rest pairwise (test_tp_pp.py).
"""

import itertools

import pytest

from engine.checksum.verdict import VerdictStatus

WORLDS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
LAYOUTS, BLOCK_SIZES, SPLITS = ("HND", "NHD"), (8, 16, 32), (1, 2)
SIDES = list(itertools.product(LAYOUTS, BLOCK_SIZES, SPLITS))
PREFIX = 32


def side(world, shape):
    (tp, pp), (layout, block_size, splits) = world, shape
    return {
        "tp_size": tp,
        "pp_size": pp,
        "layout": layout,
        "block_size": block_size,
        "kernel_block_splits": splits,
        "num_blocks": 128 // block_size + 1,
        "max_batched_tokens": 128,
    }


@pytest.mark.product
@pytest.mark.req("DEF-7", "DEF-6", "EXT-1", "EXT-2", "CON-1")
@pytest.mark.parametrize("p_shape", SIDES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize(("p", "d"), list(itertools.product(WORLDS, WORLDS)), ids=str)
def test_every_pair_of_engines_verifies(tools, new_world, p, d, p_shape):
    shared = tools.prompt("shared", PREFIX).token_ids
    prompts = [tools.prompt(f"r{n}", n, max_tokens=2, prefix=shared) for n in (45, 57)]
    for d_shape in SIDES:
        starts = []
        world = new_world("enforce", producer=side(p, p_shape), consumer=side(d, d_shape))
        world.seams.on("consumer.load_scheduled", lambda e, starts=starts: starts.append(e.groups[0].start))
        for prompt in prompts:
            answer = world.run([prompt])[prompt.request_id]
            assert answer.verdict.status is VerdictStatus.VERIFIED, (d_shape, answer.verdict)
            assert answer.verdict.groups[0].not_compared == (), d_shape
            assert answer.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens), d_shape
        assert starts == [0, PREFIX // world.d.config.block_size], d_shape
