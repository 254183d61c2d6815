"""As one of the parts of a MultiConnector, found by name through the plugin (CAR-2)."""

from __future__ import annotations

import pytest
from roles import BLOCK, decode, meet, plain, prefill

CHILD = {
    "kv_connector": "ChecksumNixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_checksum_mode": "enforce"},
}


@pytest.fixture(scope="module")
def engines(start, tmp_path_factory):
    def transfer(name):
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path_factory.mktemp(name))},
        }
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [CHILD, other]},
        }

    p, d = (start(name, kv_transfer_config=transfer(name), disable_hybrid_kv_cache_manager=True) for name in "pd")
    for engine in (p, d):
        assert engine.wait_until_ready().refused is None, engine.refused
    meet(p, d)
    return p, d


def test_clean_loads_verify_and_a_corrupted_one_is_computed_again(engines, prompts):
    p, d = engines
    asked = prompts(4, 2 * BLOCK, 3 * BLOCK, seed=40)
    params = prefill(p, asked)
    p("flip", layer=0, block=params[3]["remote_block_ids"][0][0], byte=77, mask=2)
    answers = decode(d, asked, params)
    assert sorted(verdict["status"] for verdict in d("take_verdicts")) == ["mismatch"] + ["verified"] * 3
    assert d("reset_prefix_cache")
    assert [answer["tokens"] for answer in answers] == plain(d, asked)
