"""The offloading connector: what is kept on the host, what is loaded from it, and that nothing of it is checked."""

import pytest

from engine.checksum.records import GroupBlocks
from engine.checksum.verdict import VerdictStatus
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.fabric import Fabric
from engine.connectors.offload import OFFLOAD, HostBlocks, OffloadScheduler
from engine.core import connected_engine
from engine.request import Request
from engine.seams import Seams


class Alone:
    """One engine with a host memory. `loads` are the groups of every load that finished."""

    def __init__(self, **options):
        self.seams, self.loads = Seams(), {}
        self.fabric = Fabric(self.seams)
        config = EngineConfig("E", **{"prefix_caching": False} | options)
        self.engine = connected_engine(OFFLOAD, config, self.seams, VirtualClock(), self.fabric)
        self.seams.on("consumer.load_finished", lambda e: self.loads.update({e.request_id: e.groups[0]}))

    def serve(self, request_id, prompt, settle=True):
        self.engine.add_request(Request(request_id, list(prompt.token_ids), prompt.max_tokens))
        found = None
        for _ in range(2000):
            outputs = self.engine.step()
            found = outputs[0] if outputs else found
            if found and (not settle or not self.engine.scheduler.has_work):
                return found
            for land in self.fabric.ready():
                land()
        raise AssertionError("no progress")


@pytest.mark.req("CAR-1", "GAP-7")
@pytest.mark.parametrize("length", [17, 40, 48, 49])
def test_a_prompt_that_was_seen_is_loaded_from_the_host(tools, length):
    alone, prompt = Alone(), tools.prompt("a", length)
    wanted = tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    first, second = (alone.serve(name, prompt) for name in ("a", "b"))
    assert first.token_ids == second.token_ids == wanted
    assert (first.verdict.status, second.verdict.status) == (VerdictStatus.NO_LOAD, VerdictStatus.NOT_CHECKED)
    assert "a" not in alone.loads
    assert alone.loads["b"].num_tokens == (length - 1) // 16 * 16, "the last prompt token is left to compute"
    assert tools.blocks_in_use(alone.engine) == 0


def test_outputs_are_kept_too_and_only_the_part_that_fits(tools):
    alone, prompt = Alone(), tools.prompt("a", 30, max_tokens=24)
    answer = alone.serve("a", prompt)
    longer = tools.prompt("b", 70, prefix=(*prompt.token_ids, *answer.token_ids))
    assert alone.serve("b", longer).token_ids == tools.tokens_alone(longer.token_ids, longer.max_tokens)
    held = len(prompt.token_ids) + len(answer.token_ids) - 1  # the last output was never computed with
    assert alone.loads["b"].num_tokens == held // 16 * 16


def test_a_local_prefix_is_not_loaded_again(tools):
    alone = Alone(prefix_caching=True, num_blocks=8)
    prompt = tools.prompt("a", 40)
    alone.serve("a", prompt)
    alone.serve("b", prompt)
    assert "b" not in alone.loads


def test_a_load_waits_for_the_copies_to_the_host_that_it_needs(tools):
    alone, prompt = Alone(), tools.prompt("a", 40)
    alone.serve("a", prompt, settle=False)
    landed = []
    alone.seams.on("transfer.op_landed", lambda event: landed.append(event.request_id))
    assert alone.serve("b", prompt).token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    loading = landed.index("b")
    assert "a@store" not in landed[loading:]
    assert landed[:loading].count("a@store") == landed.count("a@store") > 0


def test_a_load_that_arrives_damaged_is_served(tools):
    alone, prompt = Alone(), tools.prompt("a", 40)
    alone.serve("a", prompt)
    alone.seams.on("consumer.load_finished", lambda event: event.memory.fill(event.groups[0].block_ids, b"POISONED"))
    answer = alone.serve("b", prompt)
    assert answer.error is None
    assert answer.verdict.status is VerdictStatus.NOT_CHECKED


def test_host_blocks_are_given_to_others_when_nobody_uses_them():
    blocks = HostBlocks(4)
    assert blocks.add([b"a", b"b", b"c", b"d"]) == [1, 2, 3], "block 0 is the null block"
    assert blocks.add([b"d"]) == [], "all are pinned"
    blocks.unpin([1, 2, 3])
    blocks.use([b"a", b"b"])
    blocks.pin([3])
    assert blocks.add([b"d"]) == [2], "c is pinned; of a and b the end of the chain goes first"
    assert (blocks.lookup([b"a", b"b"]), blocks.lookup([b"d"])) == ([1], [2])


def test_what_is_kept_is_told_to_the_workers_once():
    connector = OffloadScheduler("E", block_size=4)
    request = Request("a", list(range(9)), 1)
    request.output_token_ids = [7]
    assert connector.request_finished(request, {0: [5, 6, 7]}) == {}
    (store,) = connector.step_message()
    assert store.block_ids == (5, 6)
    assert store.target == GroupBlocks(0, 4, 0, (1, 2), 8)
    assert connector.step_message() == ()
    assert connector.request_finished(request, {0: [5, 6, 7]}) is None, "all of it is there already"
    assert connector.sent("a")
    assert not connector.sent("a")


def test_what_a_consumer_will_read_is_not_its_business():
    request = Request("a", list(range(9)), 1, {"do_remote_decode": True})
    assert OffloadScheduler("E", block_size=4).request_finished(request, {0: [5, 6, 7]}) is None


@pytest.mark.req("CAR-1", "CAR-3")
def test_it_has_no_carrier():
    connector = OffloadScheduler("E", block_size=4)
    assert not connector.has_carrier()
    assert connector.kv_checksum_carrier(Request("a", [1], 1, {"do_remote_prefill": True}), receiving=True) is None
