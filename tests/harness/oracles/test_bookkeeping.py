from __future__ import annotations

from typing import cast

from engine.cache import KVMemory
from engine.seams import RequestEnded, Seams
from harness.history import History, Line
from harness.oracles.bookkeeping import BookkeepingOracle
from harness.oracles.view import EngineView


def engine(name: str, free: int, total: int = 9) -> EngineView:
    return EngineView(name, cast(KVMemory, None), lambda: (free, total))


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


def test_an_engine_that_a_fault_has_killed_is_not_asked() -> None:
    def nobody() -> tuple[int, int]:
        raise AssertionError("it cannot answer")

    history, seams = History(), Seams()
    oracle = BookkeepingOracle(history, (EngineView("p", cast(KVMemory, None), nobody, lambda: True), engine("d", 9)))
    oracle.attach(seams)
    seams.emit(RequestEnded("p", "r1", "length"))
    oracle.finish()
    p, d = history.lines
    assert p == {"event": "oracle.engine_killed", "engine": "p", "ends": [["r1", 1]]}
    assert d["event"] == "oracle.pool"
