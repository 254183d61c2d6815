"""What a real engine refuses to start with (POL-1, CAR-5); the unit tests have every case."""

from __future__ import annotations

import pytest
from roles import checksum_transfer


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_checksum_mode": "enforce", "enable_kv_checksum": False}, "kv_checksum_mode=enforce contradicts"),
        ({"kv_checksum_fail_closed": True}, "kv_checksum_fail_closed=True without enable_kv_checksum=True"),
    ],
    ids=["contradiction", "fail-closed alone"],
)
def test_settings_that_an_engine_refuses(start, extra, message):
    engine = start("refused", kv_transfer_config=checksum_transfer(**extra)).wait_until_ready()
    assert engine.refused is not None
    assert message in engine.refused


def test_speculative_decoding_is_refused_by_name(start):
    engine = start(
        "speculating",
        kv_transfer_config=checksum_transfer(kv_checksum_mode="log"),
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    ).wait_until_ready()
    assert engine.refused is not None
    assert "KV checksums with speculative decoding (ngram)" in engine.refused
