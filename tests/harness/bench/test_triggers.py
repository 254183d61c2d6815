"""What the benchmark of triggers counts, and that it compares nothing with what sums something else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from engine.checksum.when import KeptSums
from engine.config import PRESETS
from harness.bench import triggers as bench
from harness.commands.bench import bench as command
from harness.errors import RunError

TINY = PRESETS["tiny"]
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2  # layers, heads, K and V, elements, bytes


def test_prompts_that_share_nothing() -> None:
    traffic = bench.single_turn(random.Random(0), 3, 40)
    assert [len(prompt) for prompt in traffic.prompts] == [40, 40, 40]
    assert len({prompt[:16] for prompt in traffic.prompts}) == 3


def test_a_conversation_grows() -> None:
    traffic = bench.multi_turn(random.Random(0), 4, 100)
    assert [len(prompt) for prompt in traffic.prompts] == [25, 50, 75, 100]
    for before, after in zip(traffic.prompts, traffic.prompts[1:], strict=False):
        assert after[: len(before)] == before


@pytest.mark.req("EXT-8")
def test_what_each_trigger_reads() -> None:
    """80 tokens are five blocks. The second turn computes them all but what the first one has left: two of 16."""
    traffics = [bench.single_turn(random.Random(1), 2, 80), bench.multi_turn(random.Random(1), 2, 80)]
    found = {(one.traffic, one.trigger): one for one in bench.measure(TINY, traffics, 2)}
    alone, talk = (traffic.name for traffic in traffics)
    reads = {key: (one.tokens_read * 2, one.tokens_kept * 2) for key, one in found.items()}
    assert reads == {
        (alone, "prompt_end"): (160, 0),
        (alone, "cache"): (160, 0),
        (alone, "on_write"): (160, 160),
        (talk, "prompt_end"): (120, 0),
        # Of the first turn's 40 tokens two blocks are full.
        (talk, "cache"): (40 + 48, 32),
        (talk, "on_write"): (40 + 48, 32 + 80),
    }
    for one in found.values():
        assert one.requests == 2
        assert one.seconds > 0
        assert one.bytes_read == one.tokens_read * TOKEN_BYTES


def test_triggers_that_sum_something_else_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = KeptSums.sums
    monkeypatch.setattr(KeptSums, "sums", lambda *arguments: torch.add(sums(*arguments), 1))
    with pytest.raises(RunError, match="one of them is wrong"):
        bench.measure(TINY, [bench.single_turn(random.Random(1), 1, 40)], 1)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, ["triggers", "--tokens", "64", "--turns", "2", "--rounds", "1", *arguments])


def test_the_table_and_the_figures() -> None:
    done = run()
    assert done.exit_code == 0, done.output
    assert [word in done.stdout for word in ("prompt_end", "cache", "on_write", "MiB read")] == [True] * 4
    figures = json.loads(run("--json").stdout)
    assert len(figures) == 6
    assert {figure["trigger"] for figure in figures} == {"prompt_end", "cache", "on_write"}
