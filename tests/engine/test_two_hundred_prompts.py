"""Acceptance: 200 prompts through P and D give the tokens of one engine, with checksums on and off (CLM-2's shape)."""

import random

import numpy as np
import pytest

from engine.checksum.verdict import VerdictStatus
from engine.proxy import Prompt
from engine.seams import Seams

MAX_TOKENS = 6
PREFIXES = (24, 48, 100)


def two_hundred():
    """1 to 250 tokens; half of those that are long enough share one of three prefixes."""
    rng = random.Random(200)
    prefixes = [[rng.randrange(256) for _ in range(length)] for length in PREFIXES]
    prompts = []
    for number in range(200):
        length = [1, 2, 16, 32, 250][number] if number < 5 else int(rng.triangular(1, 250, 20))
        fits = [prefix for prefix in prefixes if len(prefix) < length]
        prefix = rng.choice(fits) if fits and rng.random() < 0.5 else []
        own = (rng.randrange(256) for _ in range(length - len(prefix)))
        prompts.append(Prompt(f"r{number}", (*prefix, *own), MAX_TOKENS))
    return prompts


PROMPTS = two_hundred()


@pytest.fixture(scope="module")
def alone(tools):
    """Tokens and KV of each prompt by itself: one chunk, one request a step, nothing cached."""
    return tools.serve(PROMPTS, max_batched_tokens=256, max_num_seqs=1, prefix_caching=False)


@pytest.mark.req("VER-6", "CLM-2")
def test_with_checksums_enforced_every_load_is_verified_and_every_token_right(tools, new_world, alone):
    world = new_world("enforce", seed=1)
    answers = world.run(PROMPTS)
    assert {name: answer.token_ids for name, answer in answers.items()} == alone[0]
    assert world.d.scheduler.checks.counts == {(VerdictStatus.VERIFIED, None): 200}
    assert all(group.not_compared == () for answer in answers.values() for group in answer.verdict.groups)
    local = [answer for answer in answers.values() if answer.verdict.groups[0].loaded[0] > 0]
    assert len(local) > 20, "prefix hits on D"
    for engine in world.engines:
        assert tools.blocks_in_use(engine) == 0


@pytest.mark.req("CLM-2")
def test_with_checksums_off_the_tokens_are_the_same(new_world, alone):
    answers = new_world("off", seed=2, consumer={"layout": "NHD"}).run(PROMPTS)
    assert {name: answer.token_ids for name, answer in answers.items()} == alone[0]
    assert {answer.verdict.status for answer in answers.values()} == {VerdictStatus.NOT_CHECKED}


@pytest.mark.parametrize(
    "options",
    [
        {"max_batched_tokens": 33, "max_num_seqs": 16, "layout": "NHD"},
        {"max_batched_tokens": 512, "max_num_seqs": 64, "block_size": 8, "num_blocks": 1024},
    ],
    ids=["small chunks", "large batches"],
)
def test_chunks_batches_layout_and_prefix_hits_change_neither_tokens_nor_kv(tools, alone, options):
    seams, first = Seams(), {}

    def look(event):
        first.setdefault(event.request_id, event.first_position)

    seams.on("worker.forward", look)
    tokens, kv = tools.serve(PROMPTS, seams, **options)
    assert sum(position > 0 for position in first.values()) > 20, "prefix hits"
    assert tokens == alone[0]
    assert set(kv) == set(alone[1])
    assert all(np.array_equal(kv[name], stored) for name, stored in alone[1].items())
