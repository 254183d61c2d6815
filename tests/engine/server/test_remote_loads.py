"""Loads through the server: what a client may say about them, and what becomes of them when things go wrong."""

import json

import pytest

from engine.checksum.policy import ChecksumSettings

ID = "x-request-id"


def tokens_of(answer):
    return answer.json["choices"][0]["token_ids"]


def settled(pair):
    return pair.d.idle and not pair.d.blocks_in_use


def test_a_verified_load(http, served_pair):
    pair = served_pair(prefix_caching=False)
    body, tokens = pair.prefilled()
    answer = http.within(http.ask(pair.d.app, body))
    assert (answer.status, tokens_of(answer)) == (200, tokens)
    assert answer.json["kv_load"] == {"verdict": "verified", "reason": None, "recomputed": False}
    http.within(http.until(lambda: settled(pair)))
    assert pair.d.metric("loads_total", verdict="verified", reason="") == 1
    assert pair.d.metric("positions_compared_total") == 3
    assert pair.d.metric("positions_not_compared_total") == 0
    assert pair.d.metric("failed_loads_total") == 0
    assert pair.d.metric("checksum_records_total") == 1
    assert all(pair.d.metric("checksum_seconds_total", stage=stage) > 0 for stage in ("sum", "decode", "compare"))
    assert pair.d.metric("checksum_seconds_total", stage="encode") == 0
    sent = len(body["kv_transfer_params"]["kv_checksums"])
    assert pair.d.metric("checksum_payload_bytes_total", direction="received") == sent
    assert pair.d.metric("checksum_payload_bytes_total", direction="sent") == 0


@pytest.mark.req("POL-6")
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("mode", ["log", "enforce"])
def test_a_client_switches_checksums_off_only_where_it_may(http, served_pair, mode, allowed):
    settings = ChecksumSettings(kv_checksum_mode=mode, allow_checksum_switch=allowed)
    pair = served_pair(prefix_caching=False, checksum=settings)
    body, tokens = pair.prefilled()
    answer = http.within(http.ask(pair.d.app, body | {"kv_checksum": False}))
    if not allowed:
        assert answer.status == 400
        assert "--allow-checksum-switch" in answer.json["error"]["message"]
        assert pair.d.idle
    else:
        assert (answer.status, tokens_of(answer)) == (200, tokens)
        assert answer.json["kv_load"] == {"verdict": "not_checked", "reason": "off", "recomputed": False}
        assert pair.d.metric("checksum_records_total") == 0
    checked, tokens = pair.prefilled("checked")
    answer = http.within(http.ask(pair.d.app, checked | {"kv_checksum": True}))
    assert (answer.status, tokens_of(answer)) == (200, tokens)
    assert answer.json["kv_load"]["verdict"] == "verified"


REFUSED = [
    {"do_remote_prefill": "yes"},
    {"do_remote_prefill": 1},
    {"do_remote_decode": []},
    {"remote_engine_id": None},
    {"remote_engine_id": 5},
    {"remote_engine_id": {"a": 1}},
    {"remote_request_id": []},
    {"remote_block_ids": None},
    {"remote_block_ids": "1,2,3"},
    {"remote_block_ids": [1, 2, 3]},
    {"remote_block_ids": [["1"]]},
    {"remote_block_ids": [[True, 2, 3]]},
    {"remote_block_ids": [[1.0, 2.0, 3.0]]},
    {"remote_block_ids": [[None]]},
]
FAILED = [
    {"remote_engine_id": "nobody"},
    {"remote_engine_id": ""},
    {"remote_engine_id": "http://127.0.0.1:9"},
    {"remote_block_ids": []},
    {"remote_block_ids": [[]]},
    {"remote_block_ids": [[1]]},
    {"remote_block_ids": [[-1, -2, -3]]},
    {"remote_block_ids": [[0, 0, 0]]},
    {"remote_block_ids": [[1, 2, 64]]},
    {"remote_block_ids": [[1, 2, 2**62]]},
    {"remote_block_ids": [[1, 2, 10**400]]},
    {"remote_block_ids": [[1, 2, 3], [1, 2, 3]]},
    {"remote_block_ids": [[1, 2, 3] + [-1] * 100_000]},
]


@pytest.mark.parametrize(
    ("changed", "status"), [*((changed, 400) for changed in REFUSED), *((changed, 500) for changed in FAILED)]
)
def test_hostile_parameters(http, served_pair, changed, status):
    """Refused, or a load that fails; the engine goes on, holds nothing, and serves the next one right."""
    pair = served_pair(prefix_caching=False)
    body, _ = pair.prefilled()
    good, tokens = pair.prefilled("good")
    params = body["kv_transfer_params"] | changed
    answer = http.within(http.ask(pair.d.app, body | {"kv_transfer_params": params}))
    assert answer.status == status, answer.data
    assert answer.json["error"]["message"]
    if status == 500:
        assert answer.json["kv_load"] == {"verdict": "not_checked", "reason": "load_failed", "recomputed": False}
        assert pair.d.metric("failed_loads_total") == 1
    after = http.within(http.ask(pair.d.app, good))
    assert (after.status, tokens_of(after)) == (200, tokens)
    http.within(http.until(lambda: settled(pair)))


@pytest.mark.parametrize("checksums", [None, 5, [], {}, "", "AAAA", "\0", "é" * 1000, "A" * 2_000_000, True])
@pytest.mark.req("WIR-2")
def test_hostile_checksums(http, served_pair, checksums):
    pair = served_pair(mode="log", prefix_caching=False)
    body, tokens = pair.prefilled()
    body["kv_transfer_params"]["kv_checksums"] = checksums
    answer = http.within(http.ask(pair.d.app, body))
    assert (answer.status, tokens_of(answer)) == (200, tokens)
    reason = "no_checksums" if checksums is None else "invalid"
    assert answer.json["kv_load"] == {"verdict": "unverified", "reason": reason, "recomputed": False}
    assert pair.d.metric("loads_total", verdict="unverified", reason=reason) == 1


def test_unknown_parameters_are_no_trouble(http, served_pair):
    pair = served_pair()
    body, tokens = pair.prefilled()
    body["kv_transfer_params"] |= {"new": {"a": [1, {"b": None}]}, "": "", "remote_host": "127.0.0.1"}
    answer = http.within(http.ask(pair.d.app, body))
    assert (answer.status, tokens_of(answer)) == (200, tokens)


@pytest.mark.parametrize("ended", ["consumed", "expired"])
def test_a_reference_that_is_used_up(http, served_pair, tools, ended):
    """Its blocks hold another prompt's KV by then: that must not become anybody's answer."""
    pair = served_pair(prefix_caching=False, producer={"num_blocks": 4})
    body, tokens = pair.prefilled()
    if ended == "consumed":
        first = http.within(http.ask(pair.d.app, body, [(ID, "first")]))
        assert tokens_of(first) == tokens
    else:
        pair.world.p.connector.end_lease("r")
    pair.prefilled("other")
    second = http.within(http.ask(pair.d.app, body, [(ID, "second")]))
    assert second.status == 500
    assert second.json["kv_load"]["verdict"] == "mismatch"
    assert "checksum mismatch" in second.json["error"]["message"]
    http.within(http.until(lambda: settled(pair)))
    assert pair.d.metric("loads_total", verdict="mismatch", reason="") == 1


def test_a_recompute_is_counted_and_told(http, served_pair):
    pair = served_pair(load_failure="recompute", prefix_caching=False)
    body, tokens = pair.prefilled()
    body["kv_transfer_params"]["remote_engine_id"] = "nobody"
    answer = http.within(http.ask(pair.d.app, body))
    assert (answer.status, tokens_of(answer)) == (200, tokens)
    assert answer.json["kv_load"] == {"verdict": "not_checked", "reason": "load_failed", "recomputed": True}
    assert pair.d.metric("recomputes_total") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_load_is_under_way(http, served_pair, stream):
    """The blocks stay until the transport has let go of them, and the id stays taken."""
    pair = served_pair(deliver=False, prefix_caching=False)
    body, _ = pair.prefilled()

    async def work():
        exchange = http.exchange(pair.d.app, headers=[(ID, "x")])
        exchange.body(json.dumps(body | {"stream": stream}).encode())
        await http.until(lambda: pair.d.engine.scheduler.num_loading)
        exchange.leave()
        await exchange.task
        await http.until(lambda: not pair.d.engine.scheduler.num_unfinished)
        assert pair.d.blocks_in_use == 3
        assert (await http.ask(pair.d.app, body, [(ID, "x")])).status == 400
        pair.deliver.set()
        await http.until(lambda: settled(pair))

    http.within(work())


def test_a_load_that_never_ends(http, served_pair):
    """The request ends with an error by its deadline; its blocks wait for the transport."""
    pair = served_pair(deliver=False, load_timeout_s=0.05, prefix_caching=False)
    body, _ = pair.prefilled()

    async def work():
        answer = await http.ask(pair.d.app, body)
        assert answer.status == 500
        assert "not done after 0.05 s" in answer.json["error"]["message"]
        assert answer.json["error"]["type"] == "kv_load_error"
        assert pair.d.blocks_in_use == 3
        pair.deliver.set()
        await http.until(lambda: settled(pair))

    http.within(work())
    assert pair.d.metric("loads_total", verdict="not_checked", reason="request_ended") == 1


def test_a_deadline_is_of_one_load_not_of_the_request(http, served_pair):
    """What runs long after its load is not ended."""
    pair = served_pair(load_timeout_s=30.0, prefix_caching=False)
    body, tokens = pair.prefilled(max_tokens=60)
    answer = http.within(http.ask(pair.d.app, body))
    assert tokens_of(answer) == tokens
