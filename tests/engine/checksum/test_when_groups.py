"""Kept sums with every kind of KV cache group: the same text whatever the trigger, and every load verifies (EXT-8)."""

import random

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.policy import TRIGGERS, ChecksumSettings
from engine.checksum.verdict import VerdictStatus
from engine.config import PRESETS
from engine.groups import kv_groups
from engine.proxy import Prompt

MODELS = ["tiny", "tiny-window", "tiny-hybrid", "tiny-mla", "tiny-indexed", "tiny-shared"]
WORLDS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


def prompts_with_shared_beginnings(rng):
    """Each begins with as much of an earlier one as it likes."""
    prompts, known = [], [()]
    for number in range(rng.randint(2, 5)):
        before = rng.choice(known)
        prefix = before[: rng.randint(0, len(before))]
        token_ids = (*prefix, *(rng.randrange(256) for _ in range(rng.randint(1, 70))))[:150]
        known.append(token_ids)
        prompts.append(Prompt(f"r{number}", token_ids, rng.randint(1, 3)))
    return prompts


def ranks(world):
    return {"tp_size": world[0], "pp_size": world[1]}


def sides_of(rng, model, **producer):
    """Two engines for prompts of up to 150 tokens. P's pool may hold hardly more than the longest of them."""
    block_size = rng.choice([8, 16])
    groups = len(kv_groups(PRESETS[model]))
    longest = groups * (-(-160 // block_size)) + 1
    return {
        "producer": {
            "num_blocks": longest + rng.choice([0, 0, 3, longest]),
            "max_batched_tokens": rng.choice([5, 16, 33, 64]),
            "steps_in_flight": rng.randint(1, 3),
            "max_num_seqs": rng.choice([1, 2, 4]),
        }
        | ranks(rng.choice(WORLDS))
        | producer,
        "consumer": {"num_blocks": 3 * longest, "prefix_caching": rng.random() < 0.5} | ranks(rng.choice(WORLDS)),
        "block_size": block_size,
        "model": PRESETS[model],
    }


def sent(new_world, trigger, version, seed, prompts, sides):
    """What P sends for each prompt, and the world."""
    settings = ChecksumSettings(kv_checksum_mode="enforce", kv_checksum_trigger=trigger, kv_checksum_version=version)
    world = new_world(checksum=settings, seed=seed, **sides)
    answers = world.run(prompts)
    for prompt in prompts:
        assert answers[prompt.request_id].verdict.status is VerdictStatus.VERIFIED, (trigger, prompt.request_id)
    return {name: output.kv_transfer_params[CHECKSUMS_PARAM] for name, output in world.prefilled.items()}, world


@pytest.mark.req("EXT-8", "PRO-9")
@pytest.mark.parametrize("model", MODELS)
@settings_of_hypothesis(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), version=st.sampled_from([1, 2]))
def test_every_trigger_sends_the_same_text_of_every_group(new_world, model, seed, version):
    rng = random.Random(seed)
    prompts, sides = prompts_with_shared_beginnings(rng), sides_of(rng, model)
    texts = [
        sent(new_world, trigger, version, seed + number, prompts, sides)[0] for number, trigger in enumerate(TRIGGERS)
    ]
    assert texts[1:] == texts[:1] * 2


@pytest.mark.req("EXT-8", "PRO-2", "DEF-8")
@pytest.mark.parametrize("model", ["tiny", "tiny-window", "tiny-mla"])
@pytest.mark.parametrize("speculator", ["repeat_last", "ngram"])
@settings_of_hypothesis(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_speculator_changes_none_of_it(new_world, model, speculator, seed):
    """It writes behind the prompt in the step that ends it."""
    rng = random.Random(seed)
    prompts = prompts_with_shared_beginnings(rng)
    sides = sides_of(rng, model, speculator=speculator, steps_in_flight=1, draft_tokens=rng.randint(1, 12))
    texts = [sent(new_world, trigger, 1, seed, prompts, sides)[0] for trigger in TRIGGERS]
    assert texts[1:] == texts[:1] * 2


@pytest.mark.req("EXT-8")
@pytest.mark.parametrize("model", MODELS)
def test_of_every_group_but_a_state_something_is_kept(new_world, tools, model):
    """Without this the texts would be alike because nothing is ever kept."""
    first = tools.prompt("a", 64)
    prompts = [first, tools.prompt("b", 100, prefix=first.token_ids)]
    sides = {"consumer": {"prefix_caching": False}, "model": PRESETS[model], "num_blocks": 96}
    for trigger in ("cache", "on_write"):
        _, world = sent(new_world, trigger, 1, 0, prompts[:1], sides)
        world.run(prompts[1:])
        (worker,) = world.p._executor._ranks.workers
        kept = worker.checksums._kept
        assert list(kept) == [group.group_id for group in kv_groups(PRESETS[model]) if not group.is_state]
        assert all(sums.num_kept > 0 for sums in kept.values())
        assert worker.checksums.times.tokens_kept > 0 or (model == "tiny-hybrid" and trigger == "cache")
