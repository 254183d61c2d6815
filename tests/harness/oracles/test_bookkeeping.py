from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.seams import BlocksAllocated, BlocksFreed, RequestEnded, Seams
from harness.history import History, Line
from harness.oracles.bookkeeping import BookkeepingOracle


def engine(name: str, free: int, blocks: int = 10) -> SimpleNamespace:
    pool = SimpleNamespace(num_free=free, num_blocks=blocks)
    return SimpleNamespace(
        config=SimpleNamespace(engine_id=name), scheduler=SimpleNamespace(kv=SimpleNamespace(pool=pool))
    )


def balance(*events: object, free: int = 9) -> list[Line]:
    history, seams = History(), Seams()
    oracle = BookkeepingOracle(history, (engine("p", free), engine("d", 9)))
    oracle.attach(seams)
    for event in events:
        seams.emit(event)
    oracle.finish()
    return history.lines


def test_a_pool_with_all_its_blocks_but_the_null_block() -> None:
    p, d = balance(RequestEnded("p", "r2", "length"), RequestEnded("p", "r1", "stop"), RequestEnded("d", "r1", "stop"))
    assert p == {"event": "oracle.pool", "engine": "p", "free": 9, "total": 9, "ends": [["r1", 1], ["r2", 1]]}
    assert d["ends"] == [["r1", 1]]


def test_blocks_that_never_came_back() -> None:
    p, d = balance(free=6)
    assert (p["free"], p["total"]) == (6, 9)
    assert (d["free"], d["total"]) == (9, 9)


def test_a_request_that_ends_twice_on_one_engine() -> None:
    p, d = balance(RequestEnded("p", "r1", "stop"), RequestEnded("d", "r1", "stop"), RequestEnded("d", "r1", "abort"))
    assert (p["ends"], d["ends"]) == ([["r1", 1]], [["r1", 2]])


@pytest.mark.parametrize("block_ids", [(), (1, 2, 3)])
def test_it_takes_whatever_is_allocated_and_freed(block_ids: tuple[int, ...]) -> None:
    assert len(balance(BlocksAllocated("p", "r1", block_ids), BlocksFreed("p", "r1", block_ids))) == 2
