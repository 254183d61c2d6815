"""The speculator: tokens are those of the model alone, and what it writes past a prompt never counts."""

import numpy as np
import pytest

from engine.checksum.payload import PayloadLimits, decode
from engine.checksum.verdict import VerdictStatus
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from engine.seams import SEAMS
from engine.speculator import accept, propose

SPECULATORS = ("repeat_last", "ngram")


def options(speculator, draft_tokens=3, **more):
    return {"speculator": speculator, "draft_tokens": draft_tokens, "steps_in_flight": 1} | more


# ---- guesses


@pytest.mark.parametrize(
    ("tokens", "count", "guesses"),
    [
        ([7], 2, [7, 7]),
        ([1, 2, 9, 8, 1, 2], 2, [9, 8]),
        ([1, 2, 9, 1, 2, 5, 1, 2], 1, [5]),
        ([1, 2, 9, 8, 1, 2], 5, [9, 8, 1, 2, 2]),
        ([3, 3, 3], 2, [3, 3]),
        ([1, 2, 3], 2, [3, 3]),
        ([1, 2], 0, []),
    ],
    ids=["one token", "as before", "as it was last", "to the end", "overlapping", "never seen", "no room"],
)
def test_an_ngram_goes_on_as_it_did(tokens, count, guesses):
    assert propose("ngram", tokens, count) == guesses


def test_the_last_token_is_repeated():
    assert propose("repeat_last", [1, 2, 9, 8, 1, 2], 3) == [2, 2, 2]


@pytest.mark.parametrize(
    ("guesses", "greedy", "tokens"),
    [([], [5], (5,)), ([1, 2], [5, 6, 7], (5,)), ([5, 2], [5, 6, 7], (5, 6)), ([5, 6], [5, 6, 7], (5, 6, 7))],
)
def test_tokens_are_the_models_own_up_to_the_first_wrong_guess(guesses, greedy, tokens):
    assert accept(guesses, greedy) == tokens


# ---- on an engine


@pytest.mark.req("PRO-2")
@pytest.mark.parametrize("speculator", SPECULATORS)
@pytest.mark.parametrize("draft_tokens", [1, 3, 16])
def test_one_engine_gives_the_same_tokens_and_kv_with_it_and_without(tools, speculator, draft_tokens):
    prompts = [tools.prompt(f"r{i}", 14 + i, max_tokens=20) for i in range(4)]
    prompts.append(tools.prompt("again", 36, max_tokens=30, prefix=(5, 6, 7, 8) * 8))
    tokens, kv = tools.serve(prompts, **options(speculator, draft_tokens))
    alone, kv_alone = tools.serve(prompts, steps_in_flight=1)
    assert tokens == alone
    assert all(np.array_equal(kv[name], kv_alone[name]) for name in kv_alone)


def test_a_request_ends_where_it_would_without(tools):
    """At EOS, and at max_tokens, also in the middle of what was accepted."""
    for max_tokens in range(1, 12):
        prompt = tools.prompt("r", 20, max_tokens=max_tokens)
        served, _ = tools.serve([prompt], **options("repeat_last", 8))
        assert served["r"] == tools.tokens_alone(prompt.token_ids, max_tokens)
    stops = type(prompt)("r", tools.eos_after_8, 30)
    served, _ = tools.serve([stops], **options("ngram", 8))
    assert served["r"] == tools.tokens_alone(stops.token_ids, 30)
    assert len(served["r"]) == 8


def test_several_tokens_come_of_one_step(tools):
    """Even a wrong guess gives one more token; a right one gives two."""
    engine = EngineCore(EngineConfig("E", **options("repeat_last")))
    prompt = tools.prompt("r", 20, max_tokens=16)
    engine.add_request(Request("r", list(prompt.token_ids), 16))
    steps = 0
    while not engine.step():
        steps += 1
    assert steps <= 8


@pytest.mark.req("PRO-2", "DEF-8")
@pytest.mark.parametrize("speculator", SPECULATORS)
@pytest.mark.parametrize("sides", [("producer",), ("consumer",), ("producer", "consumer")], ids="-".join)
@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_loads_verify_with_it_on_either_side(tools, new_world, speculator, sides, transfer):
    world = new_world(transfer=transfer, seed=3, **dict.fromkeys(sides, options(speculator)))
    prompts = [tools.prompt(f"r{i}", 13 + 9 * i, max_tokens=12) for i in range(5)]
    answers = world.run(prompts)
    assert {answers[p.request_id].verdict.status for p in prompts} == {VerdictStatus.VERIFIED}
    assert all(answers[p.request_id].token_ids == tools.tokens_alone(p.token_ids, 12) for p in prompts)
    assert [tools.blocks_in_use(engine) for engine in world.engines] == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_a_small_pool_with_preemption_makes_no_difference(tools, new_world, seed):
    small = options("ngram", 4, num_blocks=9, prefix_caching=False)
    world = new_world("enforce", "recompute", seed=seed, producer=small, consumer=small)
    prompts = [tools.prompt(f"r{i}", 20 + 7 * i, max_tokens=40) for i in range(4)]
    preempted = []
    world.seams.on("request.preempted", lambda event: preempted.append(event.request_id))
    answers = world.run(prompts)
    assert preempted
    assert all(answers[p.request_id].token_ids == tools.tokens_alone(p.token_ids, 40) for p in prompts)


@pytest.mark.req("PRO-2", "DEF-8")
@pytest.mark.parametrize("length", [33, 40, 47, 48])
def test_it_writes_past_the_prompt_before_the_sum_and_the_sum_is_that_of_the_prompt(tools, new_world, length):
    """Into the last block's free slots, and into the block behind it where the prompt fills its own."""
    sent, order, written = {}, [], {}
    for name, more in (("with", options("repeat_last")), ("without", {"steps_in_flight": 1})):
        world = new_world("log", producer=more)
        if name == "with":
            for seam in ("producer.speculator_wrote", "producer.kv_final", "producer.checksummed"):
                world.seams.on(seam, lambda event, seam=seam: order.append(seam))
            world.seams.on("producer.speculator_wrote", lambda event: written.update(event=event))
        params = world.run_producer(tools.prompt("a", length))
        limits = PayloadLimits.for_engine(4096, [16])
        payload = decode(params["kv_checksums"], limits)
        sent[name] = payload.num_tokens, payload.groups[0].values.tolist()
    assert sent["with"] == sent["without"]
    assert order == ["producer.speculator_wrote", "producer.kv_final", "producer.checksummed"]
    event = written["event"]
    assert (event.first_position, len(event.token_ids)) == (length, 3)
    assert event.groups[0].num_tokens == length
    if length % 16:
        slots = event.memory.slots(event.groups[0].block_ids[-1:])[:, :, length % 16 :][:, :, :3]
        assert slots.any(), "it wrote into the last block behind the prompt"


@pytest.mark.req("PRO-2")
def test_what_changes_between_the_speculator_and_the_sum_is_in_the_sum(tools, new_world):
    """The seam is before the checksum: a change there is of P's bytes when they are summed (GAP-1)."""
    world = new_world("log", producer=options("repeat_last"))

    def spoil(event):
        event.memory.fill(event.groups[0].block_ids[:1], b"POISONED")

    world.seams.on("producer.speculator_wrote", spoil)
    assert world.run([tools.prompt("a", 40)])["a"].verdict.status is VerdictStatus.VERIFIED
    assert "producer.speculator_wrote" in SEAMS
