"""What an engine refuses to be built from."""

import pytest

from engine.config import PRESETS, EngineConfig, preset
from engine.errors import StartupError
from engine.numerics import MAX_CONTEXT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 0}, "block_size is 0: use 1 or more"),
        ({"num_blocks": 1}, "num_blocks is 1: use 2 or more"),
        ({"max_batched_tokens": 0}, "max_batched_tokens is 0: use 1 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: use 1 or more"),
        ({"steps_in_flight": 0}, "steps_in_flight is 0: use 1 or more"),
        ({"lease_ticks": 0}, "lease_ticks is 0: use 1 or more"),
        ({"layout": "HDN"}, "layout is 'HDN': use HND or NHD"),
        ({"kv_dtype": "float32"}, "kv_dtype is 'float32': use bfloat16 or float16"),
        ({"max_model_len": 0}, "max_model_len is 0: use 1 to 1008"),
        ({"max_model_len": 1009}, r"use 1 to 1008 \(63 blocks of 16 hold 1008 tokens, the arithmetic 8192\)"),
        ({"max_model_len": MAX_CONTEXT + 1, "num_blocks": 10_000}, "use 1 to 8192"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options, says):
    with pytest.raises(StartupError, match=f"^engine e: .*{says}"):
        EngineConfig("e", **options)


def test_a_request_may_be_as_long_as_the_pool_and_the_arithmetic_allow():
    assert EngineConfig("e").context_limit == EngineConfig("e").capacity == 63 * 16
    assert EngineConfig("e", num_blocks=10_000).context_limit == MAX_CONTEXT
    assert EngineConfig("e", max_model_len=100).context_limit == 100


def test_presets_by_name():
    assert preset("small") is PRESETS["small"]
    with pytest.raises(StartupError, match="unknown model preset 'huge': use one of tiny, small"):
        preset("huge")


@pytest.mark.req("DEF-2")
@pytest.mark.parametrize("name", PRESETS)
def test_the_kv_of_a_token_is_whole_pieces_of_8_bytes(name):
    assert PRESETS[name].head_dim * 2 % 8 == 0
    assert PRESETS[name].num_heads % PRESETS[name].num_kv_heads == 0
