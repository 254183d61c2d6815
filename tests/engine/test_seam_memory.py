"""KV bytes can be changed at every seam whose event has a memory; the verdict says where in the protocol that was."""

import dataclasses

import pytest

from engine.checksum.verdict import VerdictStatus
from engine.seams import SEAMS, Stage

WITH_MEMORY = [
    seam for seam, (event, _) in SEAMS.items() if {"memory", "groups"} <= {f.name for f in dataclasses.fields(event)}
]


@pytest.mark.parametrize("seam", WITH_MEMORY)
def test_bytes_can_be_changed_where_there_is_a_memory(new_world, tools, seam):
    """What the change does to the verdict says where in the protocol the seam is."""
    expected = {
        "producer.speculator_wrote": (VerdictStatus.VERIFIED, True),  # GAP-1: before it is summed
        "producer.kv_final": (VerdictStatus.VERIFIED, True),
        "producer.checksummed": (VerdictStatus.MISMATCH, True),
        "consumer.load_scheduled": (VerdictStatus.VERIFIED, False),  # the load overwrites it
        "consumer.load_finished": (VerdictStatus.MISMATCH, True),
        "consumer.verified": (VerdictStatus.VERIFIED, True),  # GAP-2: after it was verified
        "consumer.first_use": (VerdictStatus.VERIFIED, True),
    }
    read = {}

    def fill(event):
        event.memory.fill(event.groups[0].block_ids, b"POISONED")

    more = {"steps_in_flight": 1, "speculator": "ngram"} if seam == "producer.speculator_wrote" else {}
    world = new_world("log", **more)
    world.seams.on(seam, fill)
    world.seams.on("consumer.first_use", lambda e: read.update(kv=e.memory.slots(e.groups[0].block_ids)), Stage.AFTER)
    answer = world.run([tools.prompt("a", 40)])["a"]
    poisoned = b"POISONEDPOISONED" in read["kv"].tobytes()
    assert (answer.verdict.status, poisoned) == expected[seam]
