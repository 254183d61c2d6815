"""The copy of the comparison judges as the engine's own does, on random loads with every kind of problem."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kvchaos_vllm import payload, records, verdict

from engine.checksum import payload as ours_payload
from engine.checksum import records as ours_records
from engine.checksum import verdict as ours

REASONS = [None, verdict.UnverifiedReason.NO_CHECKSUMS, verdict.UnverifiedReason.INVALID]


def values_of(rng, count):
    return rng.integers(0, 3, count, dtype=np.uint64)


def random_load(rng):
    """A payload, scheduled blocks and workers' records, as plain data."""
    world = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    sizes = {g: int(rng.choice([4, 8, 12])) for g in range(3)}
    tokens, sent_tokens = (int(rng.integers(1, 60)) for _ in range(2))
    if rng.random() < 0.6:
        sent_tokens = tokens
    nothing_sent = rng.random() < 0.03
    sent, scheduled = [], {}
    for g, size in sizes.items():
        count = -(-tokens // size)
        start = int(rng.integers(0, count))
        if rng.random() < 0.85:
            scheduled[g] = (g, size, start, tuple(range(10, 10 + count - start)), tokens)
        if not nothing_sent and rng.random() < 0.85:
            theirs = int(rng.choice([size, size, 4, 8]))
            first = int(rng.integers(0, 3))
            sent.append((g, int(rng.integers(0, 2)) + 7, theirs, first, values_of(rng, int(rng.integers(0, 9)))))
    replicas = int(rng.choice([1, 2])) if world[0] == 2 else 1
    bare = nothing_sent or rng.random() < 0.03
    workers = []
    for tp in range(world[0]):
        for pp in range(world[1]):
            if rng.random() < 0.05:
                continue
            groups = {}
            for g, blocks in scheduled.items():
                if bare or rng.random() < 0.04:
                    continue
                other = rng.random() < 0.04
                mine = (*blocks[:4], blocks[4] + 1) if other else blocks
                summed = tp % replicas == 0 or rng.random() > 0.3
                value = values_of(rng, len(blocks[3]) if summed else 0)
                layers = 7 if pp == 0 else 0
                groups[g] = (mine, layers, value, tp % replicas, replicas, summed)
            workers.append((tp, pp, groups))
    return world, tokens, sent_tokens, sent, scheduled, workers


def judged(package_payload, package_records, package_verdict, load, reason, **options):
    world, _, sent_tokens, sent, scheduled, workers = load
    blocks = {g: package_records.GroupBlocks(*fields) for g, fields in scheduled.items()}
    made = [
        package_records.WorkerRecord(
            "r",
            tp,
            pp,
            {
                g: package_records.GroupSums(package_records.GroupBlocks(*mine), *rest)
                for g, (mine, *rest) in groups.items()
            },
        )
        for tp, pp, groups in workers
    ]
    merge = package_records.merge_records(blocks, made, package_records.WorldShape(*world))
    groups = tuple(package_payload.PayloadGroup(*fields) for fields in sent)
    text = package_payload.Payload(world[0], sent_tokens, groups)
    if reason is not None:
        text = package_verdict.UnverifiedReason(reason)
    return package_verdict.judge_load(text, blocks, merge, **options)


def test_random_loads_are_judged_as_the_engine_judges_them():
    rng = np.random.default_rng(20260)
    seen = set()
    for _ in range(4000):
        load = random_load(rng)
        reason = REASONS[0] if rng.random() < 0.95 else REASONS[int(rng.integers(1, 3))]
        mine = judged(payload, records, verdict, load, reason)
        theirs = judged(ours_payload, ours_records, ours, load, reason, compare_block_sizes=True)
        assert dataclasses.asdict(mine) == dataclasses.asdict(theirs)
        assert mine.acceptable == theirs.acceptable
        seen |= {(group.status, group.reason) for group in mine.groups} | {(mine.status, mine.reason)}
    assert {status for status, _ in seen} == {"verified", "mismatch", "unverified"}
    assert {reason for _, reason in seen if reason} == set(verdict.UnverifiedReason)


@pytest.mark.parametrize("status", list(verdict.VerdictStatus))
def test_only_mismatch_and_unverified_are_not_acceptable(status):
    expected = status not in (verdict.VerdictStatus.MISMATCH, verdict.VerdictStatus.UNVERIFIED)
    assert verdict.Verdict(status).acceptable is expected
