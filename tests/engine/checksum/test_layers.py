"""Which groups are summed and under which factors; each kind of skip beside a group that still verifies (FPR)."""

import logging
from dataclasses import replace

import pytest

from engine.checksum.layers import factors, rows_fingerprint, why_skipped
from engine.checksum.payload import fingerprint
from engine.checksum.policy import ChecksumSettings
from engine.checksum.verdict import VerdictStatus
from engine.groups import CacheRow, kv_groups
from engine.presets import PRESETS

ON = ChecksumSettings()
FULL, WINDOW = kv_groups(PRESETS["tiny-window"])
STATE = kv_groups(PRESETS["tiny-hybrid"])[0]
(INDEXED,) = kv_groups(PRESETS["tiny-indexed"])


def renamed(group, *names):
    return replace(group, rows=tuple(CacheRow((name,), (layer,)) for layer, name in enumerate(names)))


@pytest.mark.req("DEF-4", "FPR-3")
def test_a_shared_cache_counts_under_the_lowest_number():
    (group,) = kv_groups(PRESETS["tiny-shared"])
    assert factors(group) == ((0, 0), (2, 0))
    swapped = replace(group, rows=(CacheRow(("model.layers.7.attn", "model.layers.3.attn"), (7, 3)),))
    assert factors(swapped) == ((3, 0),)


@pytest.mark.req("EXT-9")
def test_the_second_cache_of_a_layer_has_a_factor_of_its_own():
    assert factors(INDEXED) == ((0, 0), (0, 1), (1, 0), (1, 1))


@pytest.mark.req("FPR-1", "FPR-3")
def test_a_fingerprint_names_every_layer():
    (group,) = kv_groups(PRESETS["tiny-shared"])
    names = [(f"model.layers.{n}.self_attn.attn", "full_attention", "float16") for n in (2, 3)]
    assert rows_fingerprint(group, [1], "float16") == fingerprint(names)
    assert rows_fingerprint(group, [], "float16") == 0


SKIPS = {
    "state": (STATE, {}, replace(ON, checksum_states=False), "EXT-5 is off"),
    "compressed": (replace(FULL, tokens_per_state=4), {}, ON, "it is compressed: a state for 4 tokens"),
    "packed": (replace(FULL, packed_heads=True), {}, ON, "packed into head slots"),
    "host": (replace(FULL, host_resident=True), {}, ON, "host-resident"),
    "pieces": (replace(FULL, width=6), {}, ON, "12 bytes are not whole 8-byte pieces"),
    "tiles": (FULL, {"kernel_block_tokens": (16, 12)}, ON, "kernel blocks of 12 tokens do not tile blocks of 16"),
    "no number": (renamed(FULL, "model.attn", "model.layers.1"), {}, ON, "no single layer number"),
    "two numbers": (renamed(FULL, "model.3.layers.0", "model.layers.1"), {}, ON, "no single layer number"),
    "one number twice": (INDEXED, {}, replace(ON, several_caches=False), "EXT-9 is off"),
    "replication": (replace(FULL, num_heads=3), {"tp_size": 2}, ON, "which of 2 ranks hold which of 3 heads"),
    "heads": (replace(FULL, num_heads=2**16 + 1), {}, ON, "65537 KV heads are more than 65536"),
}


@pytest.mark.req("FPR-2")
@pytest.mark.parametrize("kind", SKIPS)
def test_what_cannot_be_checksummed_is_skipped_for_a_reason(kind):
    group, changed, settings, words = SKIPS[kind]
    given = {"tp_size": 1, "kernel_block_tokens": (16, 16), "itemsize": 2} | changed
    assert words in why_skipped(group, settings=settings, **given)


@pytest.mark.req("FPR-2")
@pytest.mark.parametrize("group", [FULL, WINDOW, STATE, INDEXED], ids=lambda group: group.spec_type)
def test_everything_else_is_summed(group):
    assert why_skipped(group, 2, (16, 8), 2, ON) is None


@pytest.mark.req("FPR-4", "VER-5", "FPR-2")
@pytest.mark.parametrize("kind", SKIPS)
def test_beside_a_group_that_is_skipped_on_both_sides_the_other_verifies(tools, new_world, monkeypatch, kind):
    skip_second(monkeypatch, kind, "PD")
    world = new_world(model=PRESETS["tiny-window"])
    verdict = world.run([tools.prompt("a", 70)])["a"].verdict
    assert (verdict.status, [group.group_id for group in verdict.groups]) == (VerdictStatus.VERIFIED, [0])


@pytest.mark.req("FPR-4", "VER-5", "VER-2")
@pytest.mark.parametrize("side", ["P", "D"])
def test_a_group_that_one_side_skips_is_unverified(tools, new_world, monkeypatch, side):
    skip_second(monkeypatch, "host", side)
    world = new_world("log", model=PRESETS["tiny-window"])
    verdict = world.run([tools.prompt("a", 70)])["a"].verdict
    assert (verdict.status, verdict.reason) == (VerdictStatus.UNVERIFIED, "one_side_only")
    assert [group.status for group in verdict.groups] == ["verified", "unverified"]


def skip_second(monkeypatch, kind, sides):
    """Let the second of two groups be skipped for this reason on these sides. P's worker is made first, then D's."""
    asked = []

    def skip(group, *args):
        asked.append("PD"[len(asked) // 2])
        return SKIPS[kind][3] if group.group_id == 1 and asked[-1] in sides else why_skipped(group, *args)

    monkeypatch.setattr("engine.checksum.worker.why_skipped", skip)


@pytest.mark.req("FPR-2")
def test_skipped_groups_are_logged_once_an_engine_at_start(new_world, caplog):
    with caplog.at_level(logging.INFO):
        new_world(model=PRESETS["tiny-skips"], producer={"tp_size": 2})
    lines = [record.message for record in caplog.records if "is not checksummed" in record.message]
    assert (
        lines
        == [
            "KV cache group 1 is not checksummed: it is host-resident",
            "KV cache group 2 is not checksummed: its KV heads are packed into head slots",
        ]
        * 2
    )
