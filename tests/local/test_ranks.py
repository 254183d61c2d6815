"""Engines of other shapes over real NIXL, as a command line starts them: ranks, groups, layouts, kernel blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PROMPT = list(range(3, 190, 2))
SHAPES = [
    ("tiny", ("--tp-size", 4, "--pp-size", 2), ("--layout", "NHD")),
    ("tiny-hybrid", ("--tp-size", 2, "--kernel-block-splits", 2), ("--pp-size", 2, "--layout", "NHD")),
    ("tiny-mla", (), ("--tp-size", 2)),
]


@pytest.mark.parametrize(("model", "producer", "consumer"), SHAPES)
@pytest.mark.req("CON-5", "EXT-1", "EXT-5")
def test_what_arrives_verifies(
    start: Callable[..., Any],
    tokens_alone: Callable[..., list[int]],
    tokens_of: Callable[..., list[int]],
    model: str,
    producer: tuple[object, ...],
    consumer: tuple[object, ...],
) -> None:
    common = ("--port", 0, "--model", model, "--kv-checksum-mode", "enforce", "--drain-ms", 100)
    p = start("engine", "--role", "producer", *common, *producer)
    d = start("engine", "--role", "consumer", *common, *consumer, "--peer", f"producer={p.url}")
    answer = d.ask(PROMPT, kv_transfer_params=p.prefill(PROMPT))
    assert answer.json()["kv_load"]["verdict"] == "verified"
    assert tokens_of(answer) == tokens_alone(PROMPT, model=model)
    for server in (p, d):
        server.until_free()
