"""The JSON Schema takes every scenario that there is and refuses what an author gets wrong, as the loader does."""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from pydantic import AfterValidator, BaseModel, BeforeValidator, PlainValidator, WrapValidator

from faults import registry
from faults.base import FaultParams, When
from harness.commands.schema import schema as command
from scenarios.document import parse_document
from scenarios.json_schema import FIELDS, scenario_schema, schema_text
from scenarios.loader import SUFFIXES
from scenarios.schema import Expectation, Scenario, read_plain

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (ROOT / "scenarios").rglob("*") if path.suffix in SUFFIXES)
VALIDATORS = (AfterValidator, BeforeValidator, PlainValidator, WrapValidator)

SOUND: dict[str, Any] = {
    "schema_version": 1,
    "name": "sound",
    "summary": "Nothing is wrong with it.",
    "incidents": ["vllm-project/vllm#52234"],
    "topology": {"producer": {"layout": "NHD", "block_size": 32}, "consumer": {"tp": 1}, "kv_dtype": "float16"},
    "workload": {"requests": 4, "prompt_tokens": [40, 200], "output_tokens": 16, "competitors": 1},
    "faults": [
        {"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}, "flips": 2, "layer": None},
        {"kind": "drop_checksums", "when": {"load": 1}, "how": "cut"},
    ],
    "known_gap": {"fail_open": "GAP-13"},
    "others": None,
    "load_failure": "recompute",
    "expect": {
        "off": {"verdict": "not_checked", "reason": "off", "outcome": "served"},
        "fail_open": {"verdict": "unverified", "reason": "invalid", "truth": "intact", "tokens": "right"},
        "fail_closed_fail": {"verdict": "mismatch", "reason": None},
        "fail_closed_recompute": {"verdict": "verified"},
    },
}


@pytest.fixture(scope="module", autouse=True)
def kinds() -> None:
    """In place of this folder's fixture: the faults that there are."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return scenario_schema()


@pytest.fixture(scope="module")
def problems(schema: dict[str, Any]) -> Callable[[Any], list[str]]:
    validator = jsonschema.Draft202012Validator(schema)
    return lambda value: [error.message for error in validator.iter_errors(value)]


def changed(path: str, value: Any) -> dict[str, Any]:
    """SOUND with something else at `a.b.0.c`; `...` takes it out."""
    scenario = copy.deepcopy(SOUND)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = scenario
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return scenario


def test_it_is_a_json_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_command_prints_it(schema: dict[str, Any]) -> None:
    done = CliRunner().invoke(command)
    assert (done.exit_code, done.stdout) == (0, schema_text())
    assert json.loads(done.stdout) == schema


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_scenario_is_valid(file: Path, problems: Callable[[Any], list[str]]) -> None:
    _, plain = parse_document(file.read_text(encoding="utf-8"), file.name)
    assert problems(plain) == []
    assert problems(Scenario.from_plain(plain).to_plain()) == []


SLIGHT: list[tuple[str, Any]] = [
    ("workload.prompt_tokens", 45),
    ("known_gap", "GAP-8"),
    ("policies", ["off", "fail_open", "fail_closed_recompute", "fail_closed_fail"]),
    ("others", {"off": {"verdict": "not_checked"}}),
    ("faults", []),
    ("faults", ...),
    ("topology", {}),
    ("load_failure", None),
    ("expect.off.reason", ...),
    ("twin", False),
]


@pytest.mark.parametrize(("path", "value"), SLIGHT)
def test_what_is_right_is_valid(path: str, value: Any, problems: Callable[[Any], list[str]]) -> None:
    scenario = changed(path, value)
    assert problems(scenario) == []
    assert read_plain(scenario)[2] == []


MISTAKES: list[tuple[str, Any]] = [
    ("schema_version", 2),
    ("schema_version", ...),
    ("name", "Stale Read"),
    ("name", "stale_read"),
    ("summary", "two\nlines"),
    ("summary", " spaced"),
    ("sumary", "a typo"),
    ("incidents", ["#52234"]),
    ("incidents", "vllm-project/vllm#52234"),
    ("policies", []),
    ("policies", ["off", "off"]),
    ("policies", ["open"]),
    ("topology.producer.tp", 3),
    ("topology.producer.block_size", 17),
    ("topology.producer.layout", "HNDD"),
    ("topology.producer.num_blocks", 3),
    ("topology.transfer", "pus"),
    ("topology.connector", "pull"),
    ("workload.in_turn", 1),
    ("topology.consumer.dcp", 0),
    ("topology.consumer.speculator", "eagle"),
    ("workload.requests", 0),
    ("workload.requests", "4"),
    ("workload.requests", True),
    ("workload.prompt_tokens", 0),
    ("workload.prompt_tokens", [40, 100, 200]),
    ("workload.prompt_tokens", [40]),
    ("faults.0.kind", "bitflip"),
    ("faults.0.kind", ...),
    ("faults.0.when", ...),
    ("faults.0.when.load", 0),
    ("faults.0.when.load", ...),
    ("faults.0.when.at", "before_verfy"),
    ("faults.0.when.at", "params_pass"),
    ("faults.0.how", "cut"),
    ("faults.0.bit", 8),
    ("faults.1.how", "drop"),
    ("faults", {"kind": "noop"}),
    ("expect", ...),
    ("expect.open", {"verdict": "verified"}),
    ("expect.off.verdict", "skipped"),
    ("expect.off.verdict", ...),
    ("expect.off.reason", "invalid"),
    ("expect.fail_open.reason", "off"),
    ("expect.fail_closed_fail.reason", "invalid"),
    ("expect.fail_closed_fail.outcome", "fail"),
    ("known_gap", "GAP-14"),
    ("known_gap", None),
    ("known_gap.fail_open", "8"),
    ("others", {"off": {}}),
    ("load_failure", "retry"),
    ("twin", "no"),
    ("checksum", {"version": 3}),
]


@pytest.mark.parametrize(("path", "value"), MISTAKES)
def test_a_mistake_is_not_valid(path: str, value: Any, problems: Callable[[Any], list[str]]) -> None:
    scenario = changed(path, value)
    assert problems(scenario)
    assert read_plain(scenario)[2], "the loader takes it"


def test_every_policy_needs_an_expectation(problems: Callable[[Any], list[str]]) -> None:
    assert problems(changed("expect.fail_open", ...)) == ["'fail_open' is a required property"]
    assert problems({**changed("expect.fail_open", ...), "policies": ["off"]}) == []


def test_every_kind_of_fault_has_a_branch(schema: dict[str, Any]) -> None:
    """With what it does and what each of its fields may hold, in words."""
    branches = [branch["$ref"].rpartition("/")[2] for branch in schema["properties"]["faults"]["items"]["oneOf"]]
    found = {schema["$defs"][name]["title"]: schema["$defs"][name] for name in branches}
    assert sorted(found) == sorted(registry.PARAMS)
    assert all(branch["description"] for branch in found.values())
    assert found["early_reuse"]["description"].startswith("The producer's lease ends and a competing prefill")
    assert found["bit_flip"]["properties"]["token"]["description"] == "Position in the request."


def test_a_new_kind_needs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class LaterParams(FaultParams):
        kind: typing.Literal["later"]
        when: When
        blocks: tuple[int, ...] = ()

    monkeypatch.setattr(registry, "PARAMS", {**registry.PARAMS, "later": LaterParams})
    validator = jsonschema.Draft202012Validator(scenario_schema())
    fault = {"kind": "later", "when": {"load": 1, "at": "any"}, "blocks": [1]}
    assert validator.is_valid(changed("faults", [fault]))
    assert not validator.is_valid(changed("faults", [{**fault, "blocks": ["1"]}]))


def test_an_author_is_told_what_every_field_means(schema: dict[str, Any]) -> None:
    ours = {model.__name__ for model in FIELDS} - {"Scenario"}
    mappings = [schema, *(schema["$defs"][name] for name in sorted(ours))]
    assert [
        name for mapping in mappings for name, field in mapping["properties"].items() if not field.get("description")
    ] == []


def test_no_rule_of_a_validator_is_forgotten() -> None:
    """pydantic cannot put into a schema what only a function knows: `FIELDS` must say it, or that it cannot."""
    judged = {(model, field) for model in _models(Scenario) for field in _judged_by_functions(model)}
    assert {(model.__name__, field) for model, field in judged if field not in FIELDS.get(model, {})} == set()
    assert (Expectation, "reason") in judged


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel) and not issubclass(part, FaultParams):
                yield from _models(part)


def _judged_by_functions(model: type[BaseModel]) -> Iterator[str]:
    for validator in model.__pydantic_decorators__.field_validators.values():
        yield from validator.info.fields
    for name, field in model.model_fields.items():
        if any(isinstance(part, VALIDATORS) for part in (*field.metadata, *_parts(field.annotation))):
            yield name


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    yield from getattr(annotation, "__metadata__", ())
    for argument in typing.get_args(annotation):
        yield from _parts(argument)
