"""A worker's half: what it sums, when, and how that reaches the scheduler."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from kvchaos_vllm.definition import block_checksums
from kvchaos_vllm.orders import Answer, Orders, PendingRecord, PendingSums
from kvchaos_vllm.paged_sums import LayerCache
from kvchaos_vllm.records import GroupBlocks
from kvchaos_vllm.worker import SummedGroup, WorkerChecksums

BLOCKS = GroupBlocks(0, 4, 1, (3, 1), 10)


def cache(seed=0, heads=2, width=16):
    """A cache [6 blocks, heads, 4 tokens, width] of random bytes."""
    random = np.random.default_rng(seed).integers(0, 256, (6, heads, 4, width), dtype=np.uint8)
    return torch.from_numpy(random)


def group(*caches, first_head=0, **replica):
    layers = [LayerCache(number, first_head, tensor) for number, tensor in enumerate(caches)]
    return SummedGroup(layers, 7, **replica)


def expected(caches, blocks, first_head=0):
    """The definition on the very blocks, taken out of the caches by hand."""
    kv = np.stack([np.concatenate([c[b].numpy() for b in blocks.block_ids], axis=1) for c in caches])
    first = blocks.start * blocks.block_size
    return block_checksums(kv, range(len(caches)), first_head, blocks.block_size, first, blocks.num_tokens).tolist()


def values(record, group_id=0):
    return record.groups[group_id].values.tolist()


def test_a_send_is_summed_when_the_step_has_computed_it():
    caches = cache(1), cache(2)
    worker = WorkerChecksums({0: group(*caches)}, 0, 0)
    worker.sum_sends(Orders(5, sends={"r": {0: BLOCKS, 9: BLOCKS}}))
    answer = worker.take_answer()
    assert answer is not None
    [(step_id, record)] = answer.sends()
    assert (step_id, record.request_id, record.tp_rank, record.pp_rank) == (5, "r", 0, 0)
    assert list(record.groups) == [0]
    assert values(record) == expected(caches, BLOCKS)
    assert worker.take_answer() is None


def test_a_load_is_summed_when_it_has_finished_and_as_its_blocks_are_then():
    caches = cache(1), cache(2)
    worker = WorkerChecksums({0: group(*caches)}, 0, 0)
    worker.expect(Orders(5, loads={"r": {0: BLOCKS}}))
    worker.sum_loads([], [])
    assert worker.take_answer() is None
    caches[1][3] += 1
    worker.sum_loads(["r", "unknown"], [])
    answer = worker.take_answer()
    assert answer is not None
    [(step_id, record)] = answer.loads()
    assert step_id == 5
    assert values(record) == expected(caches, BLOCKS)
    assert worker.num_expected == 0


def test_a_load_that_failed_is_not_summed_and_forgotten():
    worker = WorkerChecksums({0: group(cache())}, 0, 0)
    worker.expect(Orders(5, loads={"r": {0: BLOCKS}}))
    worker.sum_loads(["r"], ["r"])
    assert worker.take_answer() is None
    assert worker.num_expected == 0


def test_of_replicas_the_first_sums_what_is_sent_and_all_sum_what_was_loaded():
    tensor = cache()
    for replica in (0, 1):
        worker = WorkerChecksums({0: group(tensor, replica=replica, num_replicas=2)}, replica, 0)
        worker.sum_sends(Orders(1, sends={"r": {0: BLOCKS}}))
        worker.expect(Orders(1, loads={"r": {0: BLOCKS}}))
        worker.sum_loads(["r"], [])
        answer = worker.take_answer()
        assert answer is not None
        (_, sent), (_, loaded) = answer.sends()[0], answer.loads()[0]
        assert sent.groups[0].summed is (replica == 0)
        assert values(sent) == ([] if replica else expected([tensor], BLOCKS))
        assert values(loaded) == expected([tensor], BLOCKS)
        assert (loaded.groups[0].replica, loaded.groups[0].num_replicas) == (replica, 2)


def test_a_stage_without_a_layer_of_a_group_adds_nothing():
    worker = WorkerChecksums({0: SummedGroup([], 0)}, 0, 1)
    worker.sum_sends(Orders(1, sends={"r": {0: BLOCKS}}))
    answer = worker.take_answer()
    assert answer is not None
    assert values(answer.sends()[0][1]) == [0, 0]


def test_the_parts_of_two_workers_add_up_to_the_whole():
    whole = cache(3, heads=4)
    parts = [WorkerChecksums({0: group(whole[:, h : h + 2], first_head=h)}, h // 2, 0) for h in (0, 2)]
    total = np.zeros(2, dtype=np.uint64)
    for worker in parts:
        worker.sum_sends(Orders(1, sends={"r": {0: BLOCKS}}))
        answer = worker.take_answer()
        assert answer is not None
        total += answer.sends()[0][1].groups[0].values
    assert total.tolist() == expected([whole], BLOCKS)


def test_nobody_waits_for_the_device_before_the_answer_is_read_or_pickled():
    waited = []
    pending = PendingRecord(1, "r", 0, 0, {0: PendingSums(BLOCKS, 7, torch.tensor([1, -1]))}, lambda: waited.append(1))
    answer, other = Answer(), Answer()
    answer.add_load(pending)
    other.join(answer)
    assert other
    assert waited == []
    read = pickle.loads(pickle.dumps(other))
    assert waited == [1]
    [(step_id, record)] = read.loads()
    assert step_id == 1
    assert values(record) == [1, 2**64 - 1]
    assert other.loads()[0][1].request_id == "r"
    assert waited == [1]
