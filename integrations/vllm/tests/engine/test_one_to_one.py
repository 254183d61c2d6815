"""P and D with one worker each, fail-closed: clean loads verify, corrupted blocks never reach an answer."""

from __future__ import annotations

import pytest
from roles import BLOCK, decode, plain, prefill

ENFORCE = {"kv_checksum_mode": "enforce"}


@pytest.fixture(scope="module")
def engines(pair):
    return pair(ENFORCE | {"policy": "recompute"}, ENFORCE | {"policy": "recompute"}, max_num_batched_tokens=256)


@pytest.fixture
def p(engines):
    return engines[0]


@pytest.fixture
def d(engines):
    """The consumer, with nothing observed and nothing in its prefix cache."""
    engines[1]("take_verdicts")
    assert engines[1]("reset_prefix_cache")
    return engines[1]


def statuses(d):
    return [verdict["status"] for verdict in d("take_verdicts")]


def test_two_hundred_clean_loads_verify_and_the_tokens_are_those_without_p_and_d(p, d, prompts):
    asked = prompts(200)
    answers = []
    for first in range(0, 200, 20):
        some = asked[first : first + 20]
        answers += decode(d, some, prefill(p, some))
    verdicts = d("take_verdicts")
    assert [verdict["status"] for verdict in verdicts] == ["verified"] * 200
    blocks = sum(-(-len(prompt) // BLOCK) for prompt in asked)
    assert sum(len(verdict["groups"][0]["compared"]) for verdict in verdicts) == blocks
    assert d("reset_prefix_cache")
    expected = []
    for first in range(0, 200, 20):
        expected += plain(d, asked[first : first + 20])
    assert [answer["tokens"] for answer in answers] == expected
    assert d("take_verdicts") == []


def test_behind_a_local_prefix_only_what_is_loaded_is_compared(p, d, prompts):
    [prompt] = prompts(1, 5 * BLOCK + 7, 5 * BLOCK + 7, seed=2)
    plain(d, [prompt[: 3 * BLOCK + 1]], tokens=1)
    [answer] = decode(d, [prompt], prefill(p, [prompt]))
    [verdict] = d("take_verdicts")
    assert verdict["status"] == "verified"
    assert verdict["groups"] == [{"group_id": 0, "compared": [3, 4, 5], "differing": []}]
    assert d("reset_prefix_cache")
    assert [answer["tokens"]] == plain(d, [prompt])


def test_a_prompt_prefilled_in_chunks_verifies(p, d, prompts):
    """P computes 256 tokens a step."""
    asked = prompts(3, 600, 900, seed=3)
    answers = decode(d, asked, prefill(p, asked))
    assert statuses(d) == ["verified"] * 3
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked)


def test_a_prompt_in_p_s_own_prefix_cache_verifies(p, d, prompts):
    asked = prompts(2, 100, 150, seed=4)
    prefill(p, asked)
    answers = decode(d, asked, prefill(p, asked))
    assert statuses(d) == ["verified"] * 2
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked)


def corrupt(p, params, *, layer=1, position=1, byte=50, mask=0x40):
    """Flip a bit in P's blocks, after they were summed and before D reads them."""
    changed = p("flip", layer=layer, block=params["remote_block_ids"][0][position], byte=byte, mask=mask)
    assert changed["before"] ^ changed["after"] == mask


def test_a_corrupted_load_is_computed_again_and_does_not_stay_in_the_prefix_cache(p, d, prompts):
    """Fail-closed with recompute: the answer is right, and so is a later one to the same prompt."""
    good, bad = prompts(2, 4 * BLOCK, 5 * BLOCK, seed=5)
    params = prefill(p, [good, bad])
    corrupt(p, params[1])
    answers = decode(d, [good, bad], params)
    verdicts = {verdict["status"]: verdict for verdict in d("take_verdicts")}
    assert set(verdicts) == {"verified", "mismatch"}
    assert verdicts["mismatch"]["groups"][0]["differing"] == [1]
    later = plain(d, [bad, good])
    assert d("reset_prefix_cache")
    right = plain(d, [good, bad])
    assert [answer["tokens"] for answer in answers] == right
    assert later == [right[1], right[0]]
    assert "KV checksum mismatch, block positions by group: {0: [1]}" in d.text()


def test_every_bit_of_every_layer_head_k_and_v_counts(p, d, prompts):
    """A bit flipped at 16 places of one block: each is found, at its position."""
    asked = prompts(16, 3 * BLOCK, 3 * BLOCK, seed=6)
    params = prefill(p, asked)
    size = 2 * BLOCK * 2 * 32 * 4
    for index, each in enumerate(params):
        corrupt(p, each, layer=index % 4, position=2, byte=(index * size // 16) + index % 4, mask=1 << index % 8)
    decode(d, asked, params, tokens=1)
    verdicts = d("take_verdicts")
    assert [verdict["status"] for verdict in verdicts] == ["mismatch"] * 16
    assert [verdict["groups"][0]["differing"] for verdict in verdicts] == [[2]] * 16


@pytest.mark.parametrize(
    ("element", "status"),
    [
        (31, "verified"),
        (31 * BLOCK + 4, "verified"),
        (BLOCK * 32 + 4 * 32, "verified"),
        (2 * BLOCK * 32 - 1, "verified"),
        (31 * BLOCK, "mismatch"),
        (31 * BLOCK + 3, "mismatch"),
        (BLOCK * 32 + 4 * 32 - 1, "mismatch"),
    ],
    ids=["K first", "K last", "V next", "V last", "K of token 0", "K of token 3", "V of token 3"],
)
def test_in_the_last_block_only_the_prompt_s_slots_count(p, d, prompts, element, status):
    """Four tokens are in it. vLLM's CPU backend keeps K in columns, 32 slots of each, and behind it V in rows."""
    [prompt] = prompts(1, BLOCK + 4, BLOCK + 4, seed=7 + element)
    params = prefill(p, [prompt])
    corrupt(p, params[0], position=1, byte=4 * element + 2)
    decode(d, [prompt], params, tokens=1)
    assert statuses(d) == [status]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda params: params.pop("kv_checksums"), "no_checksums"),
        (lambda params: params.update(kv_checksums=params["kv_checksums"][:-5]), "invalid"),
        (lambda params: params.update(kv_checksums={"a": 1}), "invalid"),
    ],
    ids=["lost", "cut", "of another type"],
)
def test_a_load_without_usable_checksums_is_computed_again(p, d, prompts, change, reason):
    [prompt] = prompts(1, 70, 90, seed=8)
    [params] = prefill(p, [prompt])
    change(params)
    [answer] = decode(d, [prompt], [params])
    [verdict] = d("take_verdicts")
    assert (verdict["status"], verdict["reason"]) == ("unverified", reason)
    assert d("reset_prefix_cache")
    assert [answer["tokens"]] == plain(d, [prompt])


def test_another_request_s_parameters_verify_which_is_a_known_gap(p, d, prompts):
    """Nothing binds checksums of version 1 to the prompt (GAP-5)."""
    asked = prompts(2, 100, 100, seed=9)
    params = prefill(p, asked)
    decode(d, asked, params[::-1])
    assert statuses(d) == ["verified"] * 2


def test_another_request_s_checksums_mismatch(p, d, prompts):
    asked = prompts(2, 100, 100, seed=10)
    params = prefill(p, asked)
    params[0]["kv_checksums"] = params[1]["kv_checksums"]
    answers = decode(d, asked, params)
    assert sorted(statuses(d)) == ["mismatch", "verified"]
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked)


def test_the_counters_say_what_was_judged(p, d, prompts):
    def loads():
        samples = [sample for sample in d("metrics") if sample["name"] == "vllm:kv_checksum_loads_total"]
        return {(sample["labels"]["verdict"], sample["labels"]["reason"]): sample["value"] for sample in samples}

    before = loads()
    asked = prompts(3, 50, 60, seed=11)
    params = prefill(p, asked)
    corrupt(p, params[1])
    del params[2]["kv_checksums"]
    decode(d, asked, params, tokens=4)
    grown = {key: value - before.get(key, 0) for key, value in loads().items()}
    judged = {("verified", ""): 1, ("mismatch", ""): 1, ("unverified", "no_checksums"): 1}
    assert {key: count for key, count in grown.items() if count} == judged
