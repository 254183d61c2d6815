"""A scenario file as a JSON Schema, so that an editor completes, explains and checks it while it is written.

Made from the models that validate scenarios. What only Python can say, because a validator says it or because it was
never said, is in `FIELDS`. An editor sees less than `kvchaos validate` does: nothing here ties the parts of a scenario
together (does the longest request fit, does the load exist), so a file that the schema accepts may still be refused.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from engine.checksum.policy import EXTENSIONS
from engine.config import KERNEL_BLOCK_SPLITS
from engine.presets import PARALLEL_SIZES, PRESETS
from faults import registry
from scenarios import fields
from scenarios.schema import Checksum, Expectation, Scenario, Workload
from scenarios.topology import BLOCK_SIZES, EngineTopology, Topology
from scenarios.words import NotCheckedReason, Policy, UnverifiedReason, VerdictStatus

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LOAD = "Which request's load it acts on, counted from 1."
WHEN = "At which load, and at which moment of its life."

Schema = dict[str, Any]


def _whole(pattern: re.Pattern[str]) -> Schema:
    """A JSON Schema pattern may match anywhere; ours must match everything."""
    return {"pattern": f"^(?:{pattern.pattern})$"}


def _per_policy(value: Schema) -> Schema:
    """A mapping with a key per policy; named keys are what an editor can offer."""
    return {"type": "object", "properties": {str(policy): value for policy in Policy}, "additionalProperties": False}


_GAP: Schema = {"type": "string", **_whole(fields._GAP)}
_EXPECTATIONS = _per_policy({"$ref": "#/$defs/Expectation"})
_TOKENS: Schema = {"type": "integer", "minimum": 1}

FIELDS: Mapping[type[BaseModel], Mapping[str, Schema]] = {
    Scenario: {
        "schema_version": {"const": 1, "description": "The version of this format."},
        "name": {
            **_whole(fields._NAME),
            "maxLength": fields.MAX_NAME,
            "description": "The file's name without its ending.",
        },
        "summary": {"pattern": r"^\S(?:.*\S)?$", "description": "What goes wrong, in one line; reports show it."},
        "incidents": {
            "items": {"type": "string", **_whole(fields._INCIDENT)},
            "description": "Public reports that it replays, as owner/repo#123 (docs/incidents.md).",
        },
        "policies": {"uniqueItems": True, "description": "The policies that it runs under. Each is one cell."},
        "topology": {"description": "The pair of engines that it runs on."},
        "checksum": {"description": "Which checksum definition the engines use."},
        "workload": {"description": "The requests that are sent."},
        "faults": {"description": "What goes wrong, one item a fault (docs/faults.md); none: a clean scenario."},
        "expect": {
            **_EXPECTATIONS,
            "description": "What must come out under each policy: of the faulted loads, or of all without a fault.",
        },
        "others": {
            "anyOf": [_EXPECTATIONS, {"type": "null"}],
            "description": "What must come out of the loads without a fault. Default: what a clean run gives.",
        },
        "load_failure": {"description": "What off and fail_open do with a load that the connector reports as failed."},
        "known_gap": {
            "anyOf": [_GAP, _per_policy(_GAP)],
            "description": "The known gap of docs/spec.md that lets it through; for all policies, or per policy.",
        },
        "twin": {"description": "Whether its clean twin runs too: the same seed, each fault replaced by noop."},
    },
    Topology: {
        "producer": {"description": "The engine that prefills."},
        "consumer": {"description": "The engine that loads the KV and decodes."},
        "model": {"enum": list(PRESETS), "description": "The model; its weights come from the seed."},
        "kv_dtype": {"description": "What K and V are stored as."},
        "transfer": {
            "description": "Who moves the KV: in a pull the consumer reads it, in a push the producer writes."
        },
        "connector": {"description": "What moves the KV, by name. Default: what there is for the transfer."},
    },
    EngineTopology: {
        "tp": {
            "enum": list(PARALLEL_SIZES),
            "description": "Tensor-parallel ranks; with more than KV heads, replicas.",
        },
        "pp": {"enum": list(PARALLEL_SIZES), "description": "Pipeline stages. They divide the model's layers."},
        "block_size": {"enum": list(BLOCK_SIZES), "description": "Tokens a block."},
        "layout": {"description": "Order of heads (H) and tokens (N) in a block of the cache."},
        "kernel_block_splits": {
            "enum": list(KERNEL_BLOCK_SPLITS),
            "description": "Kernel blocks that a block lies in.",
        },
        "num_blocks": {"description": "Blocks of the pool; one of them is the null block and holds nothing."},
        "max_batched_tokens": {"description": "Tokens a step; a longer prompt is prefilled in chunks."},
        "max_num_seqs": {"description": "Requests a step."},
        "steps_in_flight": {"description": "Steps that may be scheduled before the output of the first has arrived."},
        "prefix_caching": {"description": "Whether blocks of an equal prefix are used again."},
        "max_model_len": {"description": "Tokens of the longest request. Default: what the pool holds."},
        "dcp": {
            "description": "Decode context parallelism, declared: with more than 1, checksums are disabled (CAR-5)."
        },
        "pcp": {
            "description": "Prefill context parallelism, declared: with more than 1, checksums are disabled (CAR-5)."
        },
        "collects_all_stages": {
            "description": "Whether the outputs of all pipeline stages reach the scheduler; if not, and pp is more "
            "than 1, checksums are disabled (CAR-5)."
        },
        "speculator": {"description": "What guesses the next tokens. It needs steps_in_flight: 1."},
        "draft_tokens": {"description": "How many tokens a speculator guesses a step."},
        "checksums_after_speculator": {
            "description": "Whether the runner can checksum once its speculator has written; if not, it refuses to "
            "start with both (CAR-5)."
        },
    },
    Checksum: {
        "version": {"enum": [1, 2], "description": "The definition's version: 1 (docs/spec.md, DEF), 2 (HRD)."},
        "without": {
            "items": {"enum": list(EXTENSIONS)},
            "description": "Extensions of docs/spec.md (EXT) that both engines do without.",
        },
    },
    Workload: {
        "requests": {"description": "How many requests; each is one load."},
        "prompt_tokens": {
            "anyOf": [_TOKENS, {"type": "array", "items": _TOKENS, "minItems": 2, "maxItems": 2}],
            "description": "Length of a prompt, or [lowest, highest]: drawn, both ends included.",
        },
        "output_tokens": {"description": "Tokens that each request asks for."},
        "competitors": {"description": "Prefills that want all of the producer's blocks; early_reuse lets them in."},
        "shared_prefix_tokens": {"description": "Tokens that all prompts begin with; fewer than the shortest prompt."},
        "identical_prompts": {"description": "Whether all requests have the same prompt."},
        "in_turn": {"description": "Whether each request is sent only when the one before has been answered."},
        "bidirectional": {
            "description": "Whether the consumer holds each request for another reader: such loads carry no checksums."
        },
    },
    Expectation: {
        "verdict": {"description": "What the engine's check says of the load."},
        "reason": {"description": "Why it is unverified or not_checked. Left out: any reason."},
        "outcome": {"description": "How the request ends. Left out: not judged."},
        "truth": {"description": "Whether the consumer got and read what the producer held. Left out: not judged."},
        "tokens": {"description": "Whether the answer is that of one engine without transfer. Left out: not judged."},
    },
}
"""What the models do not say themselves. An entry is needed for each field that a validator of ours judges; it is
only a description where JSON Schema has no word for the rule."""


class _Untitled(GenerateJsonSchema):
    """pydantic's titles only repeat the names of the fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def own_kinds() -> list[str]:
    """The kinds of fault that kvchaos brings, without those of other distributions."""
    return [kind for kind in registry.kinds() if kind not in registry.FAULTS.installed]


def schema_text(kinds: Iterable[str] | None = None) -> str:
    """The schema as it is printed and committed."""
    return json.dumps(scenario_schema(kinds), indent=2) + "\n"


def scenario_schema(kinds: Iterable[str] | None = None) -> Schema:
    """The JSON Schema of a scenario file (draft 2020-12).

    Args:
        kinds: the kinds of fault that it knows, a branch each. Default: `own_kinds`.

    Raises:
        ExtensionError: a kind is another distribution's, and cannot be used.
    """
    models = {kind: registry.params_model(kind) for kind in sorted(own_kinds() if kinds is None else kinds)}
    faults = {kind: model for kind, model in models.items() if model is not None}
    inputs: list[Any] = [(model, "validation") for model in (Scenario, *faults.values())]
    refs, document = models_json_schema(inputs, ref_template="#/$defs/{model}", schema_generator=_Untitled)
    defs: dict[str, Schema] = document["$defs"]
    for definition in defs.values():
        definition.pop("title", None)
    for model, described in FIELDS.items():
        _describe(defs[model.__name__]["properties"], described)
    branches = []
    for kind, params in faults.items():
        reference = refs[params, "validation"]
        _name_fault(kind, defs[_target(reference)], defs)
        branches.append(reference)
    scenario = defs.pop("Scenario")
    scenario["properties"]["faults"]["items"] = {"oneOf": branches} if branches else False
    defs["Expectation"]["allOf"] = list(_reasons())
    root = {
        "$schema": DIALECT,
        "title": "kvchaos scenario",
        **scenario,
        "description": "What to run, what goes wrong, and what must come out under each policy.",
        "allOf": [_all_policies()],
    }
    used = _used(root, defs)
    return {**_tidy(root), "$defs": {name: _tidy(defs[name]) for name in sorted(used)}}


def _describe(properties: dict[str, Schema], described: Mapping[str, Schema]) -> None:
    for name, words in described.items():
        field = properties[name]
        if "anyOf" in words or words.get("type") == "object":  # the whole shape, not an addition to pydantic's
            field = {key: field[key] for key in ("default",) if key in field}
        properties[name] = {**field, **words}


def _name_fault(kind: str, params: Schema, defs: Mapping[str, Schema]) -> None:
    """What an editor shows while a fault is written: its kind, what it does, and what its fields mean."""
    summary = fault_summary(kind)
    params["title"] = kind
    params["description"] = " ".join(filter(None, (summary, params.get("description"))))
    params["properties"]["kind"].setdefault("description", summary)
    when = params["properties"]["when"]
    when.setdefault("description", WHEN)
    defs[_target(when)]["properties"]["load"].setdefault("description", LOAD)


def fault_summary(kind: str) -> str:
    """What a fault does, in a sentence or two: what its file opens with, or its class where a file holds several."""
    fault = registry.FAULTS.get(kind)
    if fault is None:
        return ""
    alone = sum(other.__module__ == fault.__module__ for other in registry.FAULTS.values()) == 1
    text = inspect.getdoc(sys.modules[fault.__module__] if alone else fault) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _reasons() -> Iterator[Schema]:
    """Only unverified and not_checked have reasons, each its own."""
    unverified, not_checked = [str(r) for r in UnverifiedReason], [str(r) for r in NotCheckedReason]
    legal = {VerdictStatus.UNVERIFIED: unverified, VerdictStatus.NOT_CHECKED: not_checked}
    for verdict in VerdictStatus:
        reasons = legal.get(verdict, [])
        yield {
            "if": {"properties": {"verdict": {"const": str(verdict)}}, "required": ["verdict"]},
            "then": {"properties": {"reason": {"enum": [*reasons, None]}}},
        }


def _all_policies() -> Schema:
    """A scenario that does not name its policies runs under all, so it must expect something of each."""
    return {
        "if": {"not": {"required": ["policies"]}},
        "then": {"properties": {"expect": {"required": [str(policy) for policy in Policy]}}},
    }


def _target(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _used(root: Any, defs: Mapping[str, Schema]) -> set[str]:
    """The definitions that the root reaches."""
    found: set[str] = set()
    waiting = [root]
    while waiting:
        for name in _references(waiting.pop()):
            if name not in found:
                found.add(name)
                waiting.append(defs[name])
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield _target(schema)
    parts: Iterable[Any] = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for part in parts:
        yield from _references(part)


def _tidy(schema: Any) -> Any:
    """Descriptions where an editor looks for them, and no defaults that only repeat those of the parts."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {key: value if key == "default" else _tidy(value) for key, value in schema.items()}
    if isinstance(tidy.get("default"), dict):
        del tidy["default"]
    for branch in tidy.get("anyOf", []) if "description" not in tidy else []:
        if "description" in branch:
            tidy["description"] = branch.pop("description")
            break
    return tidy
