"""Peers and the agent, over a NIXL that is played: who is asked, and what is believed of the answer."""

import sys

import pytest

from engine.connectors.nixl import NixlPatience
from engine.connectors.nixl_memory import PeerError
from engine.connectors.nixl_peers import NixlAgent
from engine.errors import StartupError
from engine.request import FinishReason

PATIENCE = NixlPatience()


def test_the_engine_goes_on_while_a_peer_is_asked(nixl_pair, tools):
    pair = nixl_pair()
    waiting, tokens = pair.prefilled("waiting")
    pair.may_answer.clear()
    pair.d.add_request(waiting)
    pair.step_until(lambda: pair.asked)
    other, _ = pair.prefilled("other")
    other.kv_transfer_params = None
    assert pair.serve(other)["other"].finish_reason is FinishReason.LENGTH
    pair.may_answer.set()
    assert pair.finish(waiting)["waiting"].token_ids == tokens


def test_a_peer_that_does_not_answer_in_time(nixl_pair):
    """Its loads fail by the deadline, later ones at once while the question is open, and it can come back."""
    pair = nixl_pair()
    pair.may_answer.clear()
    early = [pair.prefilled(name)[0] for name in ("a", "b")]
    for request in early:
        pair.d.add_request(request)
    pair.step_until(lambda: pair.asked)
    pair.seconds += PATIENCE.meet_s + 1
    late, _ = pair.prefilled("c")
    outputs = pair.finish(*early) | pair.serve(late)
    assert {output.verdict.reason for output in outputs.values()} == {"load_failed"}
    assert pair.asked == ["P"]
    pair.seconds = 0.0
    pair.may_answer.set()
    request, tokens = pair.prefilled("d")
    assert pair.serve(request)["d"].token_ids == tokens
    assert pair.asked == ["P"]
    assert pair.free


@pytest.mark.parametrize("error", [PeerError("refused"), RuntimeError("a bug in who asks"), OSError("no network")])
def test_a_peer_that_cannot_be_asked(nixl_pair, error):
    pair = nixl_pair()
    good = pair.answers["P"]
    pair.answers["P"] = error
    assert pair.serve(pair.prefilled("a")[0])["a"].verdict.reason == "load_failed"
    pair.answers["P"] = good
    request, tokens = pair.prefilled("b")
    assert pair.serve(request)["b"].token_ids == tokens


def test_an_engine_that_is_no_peer(nixl_pair):
    pair = nixl_pair()
    request, _ = pair.prefilled(remote_engine_id="stranger")
    assert pair.serve(request)["r"].verdict.reason == "load_failed"
    assert pair.free


def changed(answer, group=(), rank=()):
    """What an engine of one group and rank says of itself, with other values."""
    found = answer["groups"][0]
    ranks = [found["ranks"][0] | dict(rank)]
    return answer | {"groups": [found | {"ranks": ranks} | dict(group)]}


WRONG = [
    {"metadata": None},
    {"metadata": "not base64!"},
    {"metadata": "AAAA"},
    {"metadata": "\ud800"},
    {"groups": None},
    {"groups": [{}]},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_peer_that_describes_itself_wrongly(nixl_pair, wrong):
    pair = nixl_pair()
    pair.answers["P"] = pair.answers["P"] | wrong
    output = pair.serve(pair.prefilled()[0])["r"]
    assert (output.finish_reason, output.verdict.reason) == (FinishReason.ERROR, "load_failed")
    assert pair.free


@pytest.mark.parametrize("missing", ["metadata", "groups"])
def test_a_peer_that_leaves_something_out(nixl_pair, missing):
    pair = nixl_pair()
    pair.answers["P"] = {name: value for name, value in pair.answers["P"].items() if name != missing}
    assert pair.serve(pair.prefilled()[0])["r"].verdict.reason == "load_failed"


@pytest.mark.parametrize("group", [{"bytes_per_token": 128, "num_parts": 4}, {"num_parts": 1}])
def test_a_peer_that_keeps_other_kv_is_not_met(nixl_pair, caplog, group):
    pair = nixl_pair()
    pair.answers["P"] = changed(pair.answers["P"], group)
    assert pair.serve(pair.prefilled()[0])["r"].verdict.reason == "load_failed"
    assert "keeps other KV than this engine" in caplog.text
    assert pair.d_agent.api.known == {}


def test_addresses_that_are_not_the_peers_are_not_read(nixl_pair):
    pair = nixl_pair()
    bases = [base + (1 << 30) for base in pair.answers["P"]["groups"][0]["ranks"][0]["bases"]]
    pair.answers["P"] = changed(pair.answers["P"], rank={"bases": bases})
    assert pair.serve(pair.prefilled()[0])["r"].verdict.reason == "load_failed"
    assert pair.net.handles == []


def test_a_producer_that_was_restarted_is_met_again(nixl_pair):
    """The first load still goes to the agent that it knew, and fails; the next one asks again."""
    pair = nixl_pair()
    pair.serve(pair.prefilled("a")[0])
    old = pair.p_agent.name
    pair.restart_producer()
    assert pair.serve(pair.prefilled("b")[0])["b"].verdict.reason == "load_failed"
    assert pair.d_agent.api.removed == [old]
    request, tokens = pair.prefilled("c")
    assert pair.serve(request)["c"].token_ids == tokens
    assert pair.asked == ["P", "P"]
    assert pair.free


def test_an_engine_takes_the_place_of_another(nixl_pair):
    """Its memory is the one that is registered, and it knows no peers."""
    pair = nixl_pair()
    pair.serve(pair.prefilled("a")[0])
    before = list(pair.d_agent.api.regions)
    pair.d_agent.register(pair.p.memory)
    assert pair.d_agent.api.removed == [pair.p_agent.name]
    assert len(pair.d_agent.api.regions) == 2
    assert pair.d_agent.api.regions != before


def test_two_agents_of_one_engine_have_different_names(nixl_pair):
    pair = nixl_pair()
    assert len({pair.p_agent.name, NixlAgent("P").name, NixlAgent("P").name}) == 3


def test_nixl_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(StartupError, match=r"kvchaos\[nixl\].*kvchaos doctor"):
        NixlAgent("P")


class Broken:
    """A NIXL whose agent cannot be made, or lacks what we need."""

    def __init__(self, make):
        self.nixl_agent = make
        self.nixl_agent_config = lambda backends: backends


def test_nixl_that_makes_no_agent(monkeypatch):
    def fail(name, config):
        raise RuntimeError("no plugins")

    monkeypatch.setitem(sys.modules, "nixl._api", Broken(fail))
    with pytest.raises(StartupError, match="no plugins"):
        NixlAgent("P")


def test_nixl_without_ucx(monkeypatch):
    agent = type("Agent", (), {"backends": {}})()
    monkeypatch.setitem(sys.modules, "nixl._api", Broken(lambda name, config: agent))
    with pytest.raises(StartupError, match="UCX"):
        NixlAgent("P")
