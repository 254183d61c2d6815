"""A layer against plain arithmetic, and the claim that a prompt's tokens and KV depend on nothing but the prompt."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from engine.config import PRESETS, EngineConfig
from engine.core import EngineCore
from engine.model import Model, load_model
from engine.model.attention import _attend_rows, attend, hidden_from
from engine.numerics import ACTIVATION_SCALE, exp_table, rms_norm
from engine.paged import PagedKVCache
from engine.request import Request
from engine.sharding import whole_model

TINY = load_model(PRESETS["tiny"], 0)
WHOLE = whole_model(PRESETS["tiny"])
EXP = exp_table("cpu")
TABLE = [Fraction(value) for value in EXP.tolist()]


def activations(seed, *shape, largest=4.0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.rint(rng.uniform(-largest, largest, shape) * ACTIVATION_SCALE) / ACTIVATION_SCALE)


def attend_one(q, k, v):
    """One query over its context, one value column after the other, in fractions: no order, no batch."""
    scores = [sum(Fraction(a) * Fraction(b) for a, b in zip(q, key, strict=True)) / 4 for key in k]
    weights = [TABLE[min(round((max(scores) - score) * 2**12), 2**16 - 1)] for score in scores]
    outputs = []
    for column in zip(*v, strict=True):
        total = sum(w * Fraction(x) for w, x in zip(weights, column, strict=True))
        quotient = float(total) / float(sum(weights))
        outputs.append(round(quotient * ACTIVATION_SCALE) / ACTIVATION_SCALE)
    return outputs


def test_attention_is_causal_grouped_and_exact():
    tokens, first = 3, 2
    q, k, v = (activations(i, *shape) for i, shape in enumerate([(tokens, 4, 16), (5, 2, 16), (5, 2, 16)]))
    attended = TINY.mixers[0].attend((q,), [(k, v)], first, 0, WHOLE)
    for token in range(tokens):
        for head in range(4):
            context = first + token + 1
            wanted = attend_one(
                q[token, head].tolist(), k[:context, head // 2].tolist(), v[:context, head // 2].tolist()
            )
            assert attended[token, head].tolist() == wanted, (token, head)


def test_attention_does_not_depend_on_the_chunk():
    q, k, v = (activations(i, *shape) for i, shape in enumerate([(24, 4, 16), (24, 2, 16), (24, 2, 16)]))
    whole = TINY.mixers[0].attend((q,), [(k, v)], 0, 0, WHOLE)
    for chunk in (1, 5, 23):
        parts = [
            TINY.mixers[0].attend((q[a : a + chunk],), [(k[: a + chunk], v[: a + chunk])], a, 0, WHOLE)
            for a in range(0, 24, chunk)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("score_bytes", [1, 24 * 4 * 8 * 5, 10**9])
def test_attention_does_not_depend_on_how_much_is_in_memory_at_once(monkeypatch, first, score_bytes, window):
    """Row by row, five at a time with a rest, all at once."""
    context = first + 24
    q, k, v = (activations(i, *shape) for i, shape in enumerate([(24, 4, 16), (context, 2, 16), (context, 2, 16)]))
    hidden = hidden_from(first, 24, window, q.device)
    whole = _attend_rows(q, k, v, EXP, hidden)
    monkeypatch.setattr("engine.model.attention._SCORE_BYTES", score_bytes)
    assert torch.equal(attend(q, k, v, EXP, hidden), whole)


def test_attention_survives_what_a_fault_leaves_in_the_cache():
    q, k, v = (activations(i, *shape) for i, shape in enumerate([(2, 4, 16), (6, 2, 16), (6, 2, 16)]))
    for bad in (float("nan"), float("inf"), float("-inf"), 3e38):
        k[1], v[2] = bad, bad
        attended = TINY.mixers[0].attend((q,), [(k, v)], 4, 0, WHOLE)
        assert torch.all(attended.abs() <= 32)


def qkv(x, position):
    projected = TINY.mixers[0].project(rms_norm(x), torch.tensor([position]), WHOLE)
    return projected.query[0], *projected.entries[0]


def test_positions_matter_and_are_relative():
    x = activations(0, 1, 64)
    q0, k0, v0 = qkv(x, 0)
    q9, k9, v9 = qkv(x, 9)
    assert not torch.equal(q0, q9)
    assert not torch.equal(k0, k9)
    assert torch.equal(v0, v9)
    near, far = (qkv(x, p)[0][:, :2] for p in (9, 109))
    key_near, key_far = (qkv(x, p)[1] for p in (5, 105))
    # Rotation by tables of 12 bits: equal up to their rounding.
    assert torch.allclose((near * key_near).sum(-1), (far * key_far).sum(-1), atol=0.1)


def test_weights_come_from_the_seed_alone():
    assert torch.equal(Model(PRESETS["tiny"], 3).head, Model(PRESETS["tiny"], 3).head)
    assert not torch.equal(Model(PRESETS["tiny"], 3).head, Model(PRESETS["tiny"], 4).head)


@pytest.fixture
def prompts(tools):
    shared = tools.prompt("shared", 40).token_ids
    lengths = (1, 2, 15, 16, 17, 47, 64, 90)
    return [tools.prompt(f"p{n}", n, max_tokens=6, prefix=shared if n > 40 else ()) for n in lengths]


@pytest.mark.parametrize("model", ["tiny", "small"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_tokens_and_kv_depend_on_the_prompt_alone(tools, prompts, model, kv_dtype):
    fixed = {"model": PRESETS[model], "kv_dtype": kv_dtype}
    tokens, kv = {}, {}
    for prompt in prompts:
        alone = tools.serve([prompt], prefix_caching=False, max_batched_tokens=1024, **fixed)
        tokens |= alone[0]
        kv |= alone[1]
    variants = [
        {"max_batched_tokens": 1},
        {"max_batched_tokens": 7, "max_num_seqs": 3},
        {"layout": "NHD", "steps_in_flight": 4},
        {"block_size": 8, "prefix_caching": False},
        {"block_size": 32, "max_batched_tokens": 33},
        {"block_size": 5, "layout": "NHD", "max_batched_tokens": 100},
    ]
    for options in variants:
        got_tokens, got_kv = tools.serve(prompts, **options, **fixed)
        assert got_tokens == tokens, options
        for name, stored in kv.items():
            assert np.array_equal(got_kv[name], stored), (options, name)


def test_a_prefix_hit_changes_nothing(tools):
    """One after the other on one engine: the second and third find their prefix in the cache."""
    shared = tools.prompt("shared", 48).token_ids
    prompts = [tools.prompt(f"h{n}", n, prefix=shared) for n in (48, 49, 70)]
    engine = EngineCore(EngineConfig("one"))
    for prompt in prompts:
        request = Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens)
        hits = engine.scheduler.kv.cached_prefix(request).num_tokens
        assert (hits > 0) == (prompt is not prompts[0])
        engine.add_request(request)
        outputs = []
        while not outputs:
            outputs = engine.step()
        assert outputs[0].token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)


@pytest.mark.parametrize("block", [0, 2, 4])
def test_another_block_anywhere_gives_other_tokens(tools, block):
    """Else wrong KV could go unnoticed by the token oracle."""
    prompt = tools.prompt("whole", 90, max_tokens=8).token_ids
    foreign = tools.prompt("foreign", 16).token_ids
    changed = (*prompt[: 16 * block], *foreign, *prompt[16 * block + 16 :])
    assert tools.tokens_alone(changed, 8) != tools.tokens_alone(prompt, 8)


def logits_of_next_step(prompt, monkeypatch, before_decode=None, on_write=None):
    """Logits of the second step of one prompt: a decode over its whole context."""
    seen = []
    logits, write = Model.logits, PagedKVCache.write

    def record(self, x):
        seen.append(logits(self, x))
        return seen[-1]

    def write_and_change(self, *args):
        write(self, *args)
        if on_write is not None and len(seen) == 1:
            on_write(self)

    engine = EngineCore(EngineConfig("one", max_batched_tokens=256))
    engine.add_request(Request("r", list(prompt.token_ids), 4))
    with monkeypatch.context() as patch:
        patch.setattr(Model, "logits", record)
        patch.setattr(PagedKVCache, "write", write_and_change)
        engine.step()
        if before_decode is not None:
            before_decode(engine.memory)
        engine.step()
    return seen[1]


@pytest.mark.parametrize("block_id", [1, 2, 3])
def test_attention_reads_the_cache(tools, monkeypatch, block_id):
    prompt = tools.prompt("read", 40)
    clean = logits_of_next_step(prompt, monkeypatch)
    assert torch.equal(logits_of_next_step(prompt, monkeypatch), clean)

    def corrupt(memory):
        memory.fill((block_id,), b"POISONED")

    assert not torch.equal(logits_of_next_step(prompt, monkeypatch, before_decode=corrupt), clean)

    def corrupt_unused(memory):
        memory.fill((0, 4, 63), b"POISONED")

    assert torch.equal(logits_of_next_step(prompt, monkeypatch, before_decode=corrupt_unused), clean)


def test_attention_reads_the_cache_for_the_tokens_of_the_step_too(tools, monkeypatch):
    prompt = tools.prompt("read", 40)
    clean = logits_of_next_step(prompt, monkeypatch)

    def corrupt_own_slot(cache):
        for layer in cache.layers:
            layer[3, :, 8] = 1.0  # position 40, the token that this step computes

    assert not torch.equal(logits_of_next_step(prompt, monkeypatch, on_write=corrupt_own_slot), clean)
