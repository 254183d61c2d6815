"""The simulated transport: what lands where, in which order, and what drops and holds do to it."""

import numpy as np
import pytest

from engine.cache import KVMemory, PagedKVCache
from engine.config import EngineConfig
from engine.connectors.fabric import Fabric
from engine.seams import Change, Completion, CopyOp, Drop, Hold, OpPosted, Seams


def memory(**options):
    return KVMemory(PagedKVCache(EngineConfig("e", **{"block_size": 4, "num_blocks": 5} | options)))


def fill_each(target, seed):
    """Different bytes in every slot."""
    rng = np.random.default_rng(seed)
    for layer in range(2):
        for head in range(2):
            for block in range(5):
                for slot in range(target.block_size):
                    data = rng.integers(0, 256, target.bytes_per_token, dtype=np.uint8)
                    target.write_slot(layer, head, block, slot, data)


class Pair:
    """P and D on one fabric; D reads."""

    def __init__(self, **options):
        self.seams = Seams()
        self.fabric = Fabric(self.seams)
        self.p, self.d = memory(**options), memory(**options)
        fill_each(self.p, 1)
        fill_each(self.d, 2)
        self.fabric.attach("P", self.p)
        self.fabric.attach("D", self.d)

    def post(self, *ops, name="r", remote="r", engine="D"):
        self.fabric.post(engine, "P", name, remote, list(ops))

    def drain(self):
        while self.fabric.ready():
            self.fabric.ready()[0]()


def op(index=0, layer=0, part=0, head=0, source=1, target=3, slots=(0, 0, 4)):
    return CopyOp(index, 0, layer, part, head, source, slots[0], target, slots[1], slots[2])


@pytest.fixture
def pair():
    return Pair()


@pytest.mark.parametrize("layouts", ["HND", "NHD"])
def test_an_operation_moves_its_slots_and_nothing_else(layouts):
    pair = Pair(layout=layouts)
    before = pair.d.slots(tuple(range(5)))
    source = pair.p.slots((1,))
    pair.post(op(layer=1, part=1, head=0, slots=(2, 0, 2)))
    pair.drain()
    after = pair.d.slots(tuple(range(5)))
    half = pair.d.bytes_per_token // 2
    assert np.array_equal(after[1, 0, 12:14, half:], source[1, 0, 2:4, half:])
    after[1, 0, 12:14, half:] = before[1, 0, 12:14, half:]
    assert np.array_equal(after, before)
    assert np.array_equal(pair.p.slots((1,)), source)


def test_bytes_are_moved_whatever_the_element_type():
    pair = Pair()
    pair.d = memory(kv_dtype="float16", layout="NHD")
    pair.fabric.attach("D", pair.d)
    for part in (0, 1):
        pair.post(*(op(i, layer=i // 2, head=i % 2, part=part) for i in range(4)), name=f"r{part}")
    pair.drain()
    assert np.array_equal(pair.d.slots((3,)), pair.p.slots((1,)))


def test_a_read_takes_what_is_there_when_it_lands(pair):
    pair.post(op())
    pair.p.fill((1,), b"POISONED")
    pair.drain()
    assert pair.d.slots((3,))[0, 0, 0, :8].tobytes() == b"POISONED"


def test_operations_of_a_load_land_in_order_and_loads_interleave(pair):
    landed = []
    pair.seams.on("transfer.op_landed", lambda event: landed.append((event.request_id, event.op.index)))
    pair.post(op(0), op(1, head=1), name="a")
    pair.post(op(0), op(1, head=1), name="b")
    assert len(pair.fabric.ready()) == 2
    pair.fabric.ready()[1]()
    pair.fabric.ready()[0]()
    pair.fabric.ready()[1]()
    pair.drain()
    assert landed == [("b", 0), ("a", 0), ("b", 1), ("a", 1)]


def test_both_sides_are_told_when_the_last_operation_has_landed(pair):
    pair.post(op(), name="mine", remote="theirs")
    assert not pair.fabric.has_mail("D")
    pair.fabric.ready()[0]()
    assert (pair.fabric.num_pending, pair.fabric.has_mail("D")) == (2, False), "notices are on their way"
    pair.drain()
    assert pair.fabric.num_pending == 0
    assert pair.fabric.has_mail("D")
    assert pair.fabric.has_mail("P")
    assert pair.fabric.take_received("D") == {"mine"}
    assert pair.fabric.take_sent("P") == {"theirs"}
    assert pair.fabric.take_received("D") == pair.fabric.take_sent("P") == frozenset()
    assert not pair.fabric.has_mail("D")


def test_two_engines_may_load_requests_of_one_name(pair):
    third = memory()
    fill_each(third, 3)
    pair.fabric.attach("D2", third)
    pair.post(op())
    pair.post(op(target=2), engine="D2")
    pair.drain()
    assert np.array_equal(pair.d.slots((3,))[0, 0, :, :32], pair.p.slots((1,))[0, 0, :, :32])
    assert np.array_equal(third.slots((2,))[0, 0, :, :32], pair.p.slots((1,))[0, 0, :, :32])
    assert pair.fabric.take_received("D") == pair.fabric.take_received("D2") == {"r"}


def test_one_engine_may_not(pair):
    pair.post(op())
    with pytest.raises(ValueError, match="engine D is reading a load r already"):
        pair.post(op())


def test_a_dropped_operation_counts_as_done(pair):
    before = pair.d.slots((3,))
    pair.seams.on("transfer.op_posted", lambda event: Drop())
    pair.post(op(0), op(1, head=1))
    pair.drain()
    assert np.array_equal(pair.d.slots((3,)), before)
    assert pair.fabric.take_received("D") == {"r"}


def test_a_changed_operation_goes_elsewhere(pair):
    def redirect(event):
        changed = CopyOp(**{name: getattr(event.op, name) for name in CopyOp.__slots__} | {"source_block": 4})
        return Change(OpPosted(event.engine, event.request_id, changed, event.num_ops, event.source, event.target))

    pair.seams.on("transfer.op_posted", redirect)
    pair.post(op())
    pair.drain()
    assert np.array_equal(pair.d.slots((3,))[0, 0, :, :32], pair.p.slots((4,))[0, 0, :, :32])


def test_a_held_operation_waits_and_holds_up_its_load_only(pair):
    gate = []
    pair.seams.on(
        "transfer.op_posted",
        lambda event: Hold(lambda: bool(gate), "closed") if event.request_id == "a" and event.op.index else None,
    )
    pair.post(op(0), op(1, head=1), name="a")
    pair.post(op(0), name="b")
    pair.drain()
    assert pair.fabric.take_received("D") == {"b"}
    assert pair.fabric.held() == ["closed"]
    gate.append(1)
    assert pair.fabric.held() == []
    pair.drain()
    assert pair.fabric.take_received("D") == {"a"}


@pytest.mark.parametrize("to_producer", [True, False])
@pytest.mark.parametrize("how", ["drop", "hold"])
def test_each_notice_can_be_lost_or_late_by_itself(pair, to_producer, how):
    gate = []

    def decide(event: Completion):
        if event.to_producer != to_producer:
            return None
        return Drop() if how == "drop" else Hold(lambda: bool(gate), "late")

    pair.seams.on("transfer.completion", decide)
    pair.post(op())
    pair.drain()
    assert (pair.fabric.has_mail("P"), pair.fabric.has_mail("D")) == (not to_producer, to_producer)
    assert pair.fabric.num_pending == (how == "hold")
    gate.append(1)
    pair.drain()
    assert pair.fabric.has_mail("P" if to_producer else "D") == (how == "hold")


def test_a_peer_is_known_by_its_name(pair):
    assert pair.fabric.peer("P") is pair.p
    assert pair.fabric.peer("nobody") is None
