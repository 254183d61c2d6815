"""What this distribution has copied from kvchaos agrees with it, on every shared vector: definition, codec, names."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from kvchaos_vllm import definition, fingerprint, payload, settings, verdict
from kvchaos_vllm.errors import StartupError
from kvchaos_vllm.paged_sums import LayerCache, block_checksums
from stand_ins import ROOT

from engine.checksum import payload as ours_payload
from engine.checksum import policy as ours_policy
from engine.checksum import verdict as ours_verdict
from kernels import definition as ours

INTEROP = ROOT / "docs" / "interop"
NPZ = sorted((ROOT / "tests" / "vectors").glob("*.npz"))
SHARED = json.loads((ROOT / "tests" / "vectors" / "payloads.json").read_text())
LIMITS = payload.PayloadLimits.for_engine(4096, (16, 16))


def kit(name):
    return json.loads((INTEROP / f"{name}.json").read_text())["vectors"]


def paged(kv, layer_numbers, first_head, block_size, block_ids, *, scattered):
    """The KV as caches [blocks, heads, tokens, bytes], its blocks where block_ids says.

    With `scattered` the bytes of a head in a block lie in a random order, which the cache says.
    """
    _, heads, tokens, width = kv.shape
    order = None
    if scattered:
        order = torch.from_numpy(np.random.default_rng(2).permutation(block_size * width)).view(block_size, width)
    caches = []
    for number, layer in zip(layer_numbers, kv, strict=True):
        cache = torch.full((max(block_ids) + 1, heads, block_size, width), 0xA5, dtype=torch.uint8)
        by_block = torch.from_numpy(layer.copy()).reshape(heads, tokens // block_size, block_size, width)
        cache[torch.tensor(block_ids)] = by_block.transpose(0, 1)
        if order is not None:
            cache.flatten(2)[:, :, order.reshape(-1)] = cache.flatten(2).clone()
        caches.append(LayerCache(number, first_head, cache, order))
    return caches


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("path", NPZ, ids=lambda path: path.stem)
def test_both_ways_to_sum_give_the_checksums_of_the_shared_vectors(path, scattered):
    with np.load(path, allow_pickle=False) as case:
        kv, expected = case["kv"], case["checksums"]
        names = "layer_numbers", "first_head", "block_size", "first_token", "num_tokens"
        numbers, first_head, block_size, first_token, num_tokens = (case[name].tolist() for name in names)
    arguments = numbers, first_head, block_size, first_token, num_tokens
    assert definition.block_checksums(kv, *arguments).tolist() == expected.tolist()
    assert ours.block_checksums(kv, *arguments).tolist() == expected.tolist()
    block_ids = np.random.default_rng(1).permutation(len(expected) + 3)[: len(expected)].tolist()
    caches = paged(kv, numbers, first_head, block_size, block_ids, scattered=scattered)
    for max_gather_bytes in (1, 4 * 2**20):
        sums = block_checksums(
            caches,
            block_ids,
            block_size=block_size,
            start=first_token // block_size,
            num_tokens=num_tokens,
            max_gather_bytes=max_gather_bytes,
        )
        assert sums.numpy().view(np.uint64).tolist() == expected.tolist()


def test_there_are_vectors():
    assert len(NPZ) >= 30
    assert len(kit("checksums")) >= 10
    assert len(SHARED["valid"]) >= 5
    assert len(SHARED["invalid"]) >= 15


@pytest.mark.parametrize("vector", kit("checksums"), ids=lambda vector: vector["name"])
def test_the_interop_checksums(vector):
    arguments = vector["arguments"]
    shape = len(arguments["layers"]), arguments["heads"], -1, arguments["bytes_per_token"]
    kv = np.frombuffer(bytes.fromhex(vector["kv"]), dtype=np.uint8).reshape(shape)
    rest = {name: arguments[name] for name in ("first_head", "block_size", "first_token", "num_tokens")}
    got = definition.block_checksums(kv, arguments["layers"], **rest)
    assert [f"{value:016x}" for value in got.tolist()] == vector["checksums"]["1"]


@pytest.mark.parametrize("vector", [*kit("fingerprints"), *SHARED["fingerprints"]], ids=lambda v: v["fingerprint"])
def test_the_fingerprints(vector):
    layers = [tuple(layer) for layer in vector["layers"]]
    assert fingerprint.fingerprint(layers) == int(vector["fingerprint"], 16) == ours_payload.fingerprint(layers)


@pytest.mark.parametrize(
    "name", ["model.layers.3.attn", "layers.03", "a.b", "layers.1.x.2", "9" * 10, "", "layers.²", "1.9"]
)
def test_the_numbers_of_layers(name):
    assert fingerprint.layer_number(name) == ours_payload.layer_number(name)


def same(mine, theirs):
    assert (mine.tp_size, mine.num_tokens) == (theirs.tp_size, theirs.num_tokens)
    fields = "group_id", "fingerprint", "block_size", "start"
    assert [[getattr(g, f) for f in fields] for g in mine.groups] == [
        [getattr(g, f) for f in fields] for g in theirs.groups
    ]
    assert [g.values.tolist() for g in mine.groups] == [g.values.tolist() for g in theirs.groups]


@pytest.mark.parametrize("case", SHARED["valid"], ids=range(len(SHARED["valid"])))
def test_the_shared_valid_payloads(case):
    mine = payload.decode(case["wire"], LIMITS)
    same(mine, ours_payload.decode(case["wire"], ours_payload.PayloadLimits.for_engine(4096, (16, 16))))
    assert payload.encode(mine) == case["wire"]


@pytest.mark.parametrize("case", SHARED["invalid"], ids=lambda case: case["why"])
def test_the_shared_invalid_payloads(case):
    with pytest.raises(payload.PayloadInvalid, match=r"^payload: "):
        payload.decode(case["wire"], LIMITS)


@pytest.mark.parametrize("vector", kit("payloads"), ids=lambda vector: vector["name"])
def test_the_interop_payloads_of_version_1_are_read_and_those_of_version_2_are_invalid(vector):
    limits = payload.PayloadLimits(2**20, 16, 2**40)
    if vector["payload"]["version"] == 2:
        with pytest.raises(payload.PayloadInvalid, match="version is 2, this package reads 1"):
            payload.decode(vector["text"], limits)
        return
    read = payload.decode(vector["text"], limits)
    assert (read.tp_size, read.num_tokens) == (vector["payload"]["tp_size"], vector["payload"]["num_tokens"])
    got = [
        [g.group_id, f"{g.fingerprint:016x}", g.block_size, g.start, [f"{v:016x}" for v in g.values.tolist()]]
        for g in read.groups
    ]
    assert got == vector["payload"]["groups"]
    assert payload.encode(read) == vector["text"]


def test_a_damaged_payload_is_read_as_the_engine_reads_it():
    """Every single character of a valid text changed to others: accepted and refused alike."""
    theirs_limits = ours_payload.PayloadLimits.for_engine(4096, (16, 16))
    text = SHARED["valid"][0]["wire"]
    accepted = 0
    for at in range(len(text)):
        for new in "A/z9=-":
            altered = text[:at] + new + text[at + 1 :]
            try:
                theirs = ours_payload.decode(altered, theirs_limits)
            except ours_payload.PayloadInvalid:
                theirs = None
            if theirs is not None and theirs.version != 1:
                theirs = None
            try:
                mine = payload.decode(altered, LIMITS)
            except payload.PayloadInvalid:
                mine = None
            assert (mine is None) == (theirs is None), altered
            if mine is not None and theirs is not None:
                accepted += 1
                same(mine, theirs)
    assert accepted


def test_limits_are_the_engine_s():
    for length, sizes in ((1, (1,)), (4096, (16,)), (131072, (16, 128)), (77, (32, 32, 64))):
        mine = payload.PayloadLimits.for_engine(length, sizes).for_request(5)
        theirs = ours_payload.PayloadLimits.for_engine(length, sizes).for_request(5)
        assert dataclasses.asdict(mine) == dataclasses.asdict(theirs)


@pytest.mark.parametrize("enable", [None, True, False])
@pytest.mark.parametrize("closed", [None, True, False])
@pytest.mark.parametrize("mode", [None, "off", "log", "enforce", "loud"])
def test_settings_mean_what_the_engine_s_mean_and_are_refused_alike(enable, closed, mode):
    given = {"enable_kv_checksum": enable, "kv_checksum_fail_closed": closed, "kv_checksum_mode": mode}

    def outcome(resolve, make):
        try:
            policy = resolve(make(given))
        except (StartupError, ours_policy.StartupError) as error:
            return str(error)
        return policy.enabled, policy.fail_closed

    mine = outcome(settings.resolve, settings.ChecksumSettings.from_extra_config)
    assert mine == outcome(ours_policy.resolve, lambda names: ours_policy.ChecksumSettings(**names))


@pytest.mark.parametrize("name", ["VerdictStatus", "UnverifiedReason", "NotCheckedReason"])
def test_the_words_are_the_engine_s(name):
    mine, theirs = getattr(verdict, name), getattr(ours_verdict, name)
    assert {member.name: member.value for member in mine} == {member.name: member.value for member in theirs}


def test_importing_the_package_imports_neither_torch_nor_vllm():
    code = "import kvchaos_vllm, kvchaos_vllm.plugin, sys; sys.exit(len({'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
