"""The interoperability kit: its reader, its vectors and our engine agree, and the reader stays short and plain."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from engine.checksum.hardened import unbound
from engine.checksum.payload import PayloadLimits, decode, encode, fingerprint
from kernels import definition, definition_v2

KIT = Path(__file__).parents[1] / "docs" / "interop"
VERSIONS = {"1": definition.block_checksums, "2": definition_v2.block_checksums}
ANY = PayloadLimits(2**20, 16, 2**40)


def vectors(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((KIT / f"{name}.json").read_text())["vectors"]
    return loaded


def named(vector: dict[str, Any]) -> str:
    return str(vector.get("name", "layers"))


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("interop_reader", KIT / "reader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.req("DEF-2", "DEF-3", "DEF-4", "DEF-8", "HRD-1")
@pytest.mark.parametrize("vector", vectors("checksums"), ids=named)
def test_the_reader_and_the_definitions_compute_the_checksums(reader: ModuleType, vector: dict[str, Any]) -> None:
    kv, arguments = bytes.fromhex(vector["kv"]), vector["arguments"]
    shape = (len(arguments["layers"]), arguments["heads"], -1, arguments["bytes_per_token"])
    array = np.frombuffer(kv, dtype=np.uint8).reshape(shape)
    ours = {name: arguments[name] for name in ("first_head", "block_size", "first_token", "num_tokens")}
    for version, expected in vector["checksums"].items():
        plain = reader.block_checksums(int(version), kv, **arguments)
        assert [f"{value:016x}" for value in plain] == expected
        assert VERSIONS[version](array, arguments["layers"], **ours).tolist() == plain


@pytest.mark.req("FPR-1")
@pytest.mark.parametrize("vector", vectors("fingerprints"), ids=named)
def test_the_reader_and_the_engine_give_the_fingerprints(reader: ModuleType, vector: dict[str, Any]) -> None:
    layers = [tuple(layer) for layer in vector["layers"]]
    assert f"{reader.fingerprint(layers):016x}" == f"{fingerprint(layers):016x}" == vector["fingerprint"]


@pytest.mark.req("WIR-1", "HRD-2", "HRD-3")
@pytest.mark.parametrize("vector", vectors("payloads"), ids=named)
def test_the_reader_and_the_engine_read_the_payloads(reader: ModuleType, vector: dict[str, Any]) -> None:
    read = reader.read_payload(vector["text"], vector.get("prompt", ()), vector.get("cache_salt", ""))
    for group in read["groups"]:
        group[1], group[4] = f"{group[1]:016x}", [f"{value:016x}" for value in group[4]]
    assert read == vector["payload"]
    payload = decode(vector["text"], ANY)
    assert encode(payload) == vector["text"]
    if payload.version == 2 and not vector["cache_salt"]:
        payload = unbound(payload, vector["prompt"])
    if not vector.get("cache_salt"):
        assert [[f"{v:016x}" for v in g.values.tolist()] for g in payload.groups] == [g[4] for g in read["groups"]]


@pytest.mark.req("GAP-9")
def test_the_reader_sees_that_a_payload_of_version_2_was_altered(reader: ModuleType) -> None:
    texts = [v["text"] for v in vectors("payloads") if v["payload"]["version"] == 2]
    for text in texts:
        altered = text[:6] + ("A" if text[6] != "A" else "B") + text[7:]
        with pytest.raises(ValueError, match="altered"):
            reader.read_payload(altered)


@pytest.mark.req("GAP-8", "GAP-10", "GAP-11")
def test_the_gaps_are_vectors_of_one_checksum_by_version_1_only() -> None:
    plain, *gaps = vectors("checksums")[-4:]
    assert [vector["name"].partition(":")[0] for vector in gaps] == ["GAP-8", "GAP-10", "GAP-11"]
    assert len({vector["kv"] for vector in (plain, *gaps)}) == 4
    assert {vector["checksums"]["1"][0] for vector in gaps} == set(plain["checksums"]["1"])
    assert len({vector["checksums"]["2"][0] for vector in (plain, *gaps)}) == 4


def test_the_reader_is_short_and_needs_the_standard_library_only() -> None:
    lines = (KIT / "reader.py").read_text().splitlines()
    assert len(lines) <= 60
    imported = {line.split()[1] for line in lines if line.startswith(("import", "from"))}
    assert imported <= sys.stdlib_module_names
