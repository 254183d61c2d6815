from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from engine.checksum.records import GroupBlocks
from engine.seams import LoadFinished
from faults.cancelling import Cancelling, CancellingParams, factor
from kernels.definition import block_checksums
from scenarios.words import Result, VerdictStatus

PLACE = r"piece (\d) of token (\d+), layer (\d), head (\d)"
EXCHANGED = re.compile(rf"{PLACE} and {PLACE} changed places in D's block (\d+) \(block position (\d+)\)")
ADDED = re.compile(rf"d, -2d, d added to three pieces from {PLACE} on in D's block (\d+) \(block position (\d+)\)")


def cancelling(how: str, load: int = 2) -> dict[str, Any]:
    return {"kind": "cancelling", "when": {"load": load, "at": "before_verify"}, "how": how}


@pytest.mark.parametrize("how", ["equal_factors", "linear"])
@pytest.mark.parametrize("seed", range(5))
def test_it_verifies_although_the_bytes_differ(sim, how: str, seed: int) -> None:
    pair = sim(cancelling(how), policy="fail_closed_fail", seed=seed)
    load = pair.fault.load()
    wrong = load.load_finished.differing(load.kv_final)
    (item,) = pair.fault.evidence
    pattern = EXCHANGED if how == "equal_factors" else ADDED
    assert wrong == (int(pattern.fullmatch(item.what).groups()[-1]),)
    assert load.verdict is VerdictStatus.VERIFIED
    assert load.load_finished.sums == load.kv_final.sums
    assert load.foreign
    assert pair.fault.load(1).foreign == pair.twin.load().foreign == ()
    assert pair.twin.result.result is Result.PASS


@pytest.mark.req("DEF-3", "DEF-4")
@pytest.mark.parametrize("place", [(0, 0, 0, 1), (0, 1, 0, 0), (1, 1, 37, 5), (3, 2, 200, 7)])
def test_the_factor_is_the_definitions(place: tuple[int, int, int, int]) -> None:
    """The sum of a block that is zero but for one piece of value 1 is that piece's factor."""
    layer, head, token, piece = place
    kv = np.zeros((4, 4, 16, 64), dtype=np.uint8)
    kv[layer, head, token % 16, 8 * piece] = 1
    sums = block_checksums(kv, range(4), 0, 16, token // 16 * 16, token // 16 * 16 + 16)
    assert sums.tolist() == [factor(layer, head, token, piece, 8)]


def test_the_smallest_example_of_equal_factors() -> None:
    assert factor(0, 0, 0, 1, 8) == factor(0, 1, 0, 0, 8) == 3


def finished(memory, request: str, *block_ids: int, num_tokens: int) -> LoadFinished:
    return LoadFinished("consumer", request, {0: GroupBlocks(0, 16, 0, block_ids, num_tokens)}, memory)


@pytest.mark.parametrize("seed", range(6))
def test_the_two_pieces_have_equal_factors_and_change_places(memory_of, attach, seed: int) -> None:
    memory = memory_of(seed=seed)
    seams, context = attach(cancelling("equal_factors"), seed=seed)
    before = memory.slots((5,)).view("<u8").copy()
    seams.emit(finished(memory, "r1", 5, 3, num_tokens=30))
    assert context.evidence == []
    seams.emit(finished(memory, "r2", 5, 3, num_tokens=30))
    piece, token, layer, head, piece2, token2, layer2, head2, block, position = map(
        int, EXCHANGED.fullmatch(context.evidence[0].what).groups()
    )
    assert (block, position) == (5, 0)
    assert factor(layer, head, token, piece, 8) == factor(layer2, head2, token2, piece2, 8)
    after = memory.slots((5,)).view("<u8")
    one, other = (layer, head, token, piece), (layer2, head2, token2, piece2)
    assert (after[one], after[other]) == (before[other], before[one])
    assert (after != before).sum() == 2


@pytest.mark.parametrize("seed", range(6))
def test_three_consecutive_pieces_change_by_d(memory_of, attach, seed: int) -> None:
    memory = memory_of(seed=seed)
    seams, context = attach(cancelling("linear"), seed=seed)
    before = memory.slots((5, 3)).reshape(2, 2, -1).view("<u8")
    seams.emit(finished(memory, "r2", 5, 3, num_tokens=30))
    piece, token, layer, head, *_ = map(int, ADDED.fullmatch(context.evidence[0].what).groups())
    added = memory.slots((5, 3)).reshape(2, 2, -1).view("<u8") - before
    first = token * 8 + piece
    d = added[layer, head, first]
    assert [int(n) for n in np.flatnonzero(added[layer, head])] == [first, first + 1, first + 2]
    assert added[layer, head, first + 2] == d
    assert (2 * int(d) + int(added[layer, head, first + 1])) % 2**64 == 0
    assert np.count_nonzero(added) == 3
    assert (first + 2) // 8 < 29  # D computes the last prompt token again before it reads it


def test_behind_block_0_two_heads_have_no_equal_factors(sim) -> None:
    """A load that begins behind a local prefix holds nothing to exchange."""
    one_at_a_time = {"consumer": {"max_num_seqs": 1}, "producer": {"max_num_seqs": 1}}
    ran = sim(cancelling("equal_factors", 3), topology=one_at_a_time, requests=3, shared_prefix_tokens=32).fault
    assert ran.load(3).load_finished.start == 2
    assert ran.evidence == ()
    assert ran.result.result is Result.UNKNOWN


def test_equal_content_is_no_exchange(memory_of, attach) -> None:
    memory = memory_of()
    memory.fill((5,), b"constant")
    seams, context = attach(cancelling("equal_factors"))
    seams.emit(finished(memory, "r2", 5, num_tokens=16))
    assert context.evidence == []


def test_needs() -> None:
    assert Cancelling.needs(CancellingParams.model_validate(cancelling("linear"))) == {"consumer.load_finished"}


@pytest.mark.parametrize("wrong", [{"how": "quadratic"}, {"when": {"load": 2, "at": "after_verify"}}, {"pairs": 2}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CancellingParams.model_validate(cancelling("linear") | wrong)
