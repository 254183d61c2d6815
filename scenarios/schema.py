"""A scenario as data: what to run and what must come out. Frozen, strict, and complete as plain JSON values.

These models hold what is true of one field or of fields side by side; `scenarios.checks` holds what ties the parts
of a scenario together, `scenarios.loader` reads the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, SerializeAsAny, ValidationInfo, field_validator

from engine.checksum.policy import EXTENSIONS, ChecksumSettings, LoadFailurePolicy
from engine.extensions import ExtensionError
from faults import registry
from faults.base import FaultParams
from scenarios.fields import STRICT, Extension, GapId, Incident, Name, OneLine, TokenRange, one_of
from scenarios.problems import Issue, Loc, Problem, ScenarioError, did_you_mean, field_name, listed, shown
from scenarios.topology import Topology
from scenarios.wording import MAX_ISSUES, read_model
from scenarios.words import NotCheckedReason, Outcome, Policy, Tokens, Truth, UnverifiedReason, VerdictStatus

Reason = UnverifiedReason | NotCheckedReason


class Checksum(BaseModel):
    """Which checksum definition the engines use, 1 or 2 (hardened), and which extensions they do `without` (EXT)."""

    model_config = STRICT

    version: Annotated[int, one_of(1, 2)] = 1
    without: tuple[Extension, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What a twin's name depends on. A field that came later counts only when it is used."""
        plain = self.model_dump(mode="json")
        if not self.without:
            del plain["without"]
        return plain

    def apply(self, settings: ChecksumSettings) -> ChecksumSettings:
        """The flags of an engine: this version, with the extensions switched off."""
        off: dict[str, Any] = {EXTENSIONS[name]: False for name in self.without}
        return replace(settings, kv_checksum_version=self.version, **off)


class Workload(BaseModel):
    """The requests of a cell. Prompt lengths are drawn from `prompt_tokens`, both ends included.

    `identical_prompts` gives every request the same prompt. Prefix caches would then serve all but the first: turn
    them off where each is to be loaded whole. With `in_turn` a request is sent when the one before has been answered.
    With `bidirectional` D holds each request for another reader, as P does: its loads have no carrier (CAR-4).
    """

    model_config = STRICT

    requests: Annotated[int, Field(ge=1, le=256)] = 4
    prompt_tokens: TokenRange = (40, 200)
    output_tokens: Annotated[int, Field(ge=1)] = 16
    competitors: Annotated[int, Field(ge=0, le=4)] = 0
    shared_prefix_tokens: Annotated[int, Field(ge=0)] = 0
    identical_prompts: bool = False
    in_turn: bool = False
    bidirectional: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """What seeds depend on. A field that came later counts only when it is used: old scenarios keep their seeds."""
        plain = self.model_dump(mode="json")
        for name in ("identical_prompts", "in_turn", "bidirectional"):
            if not plain[name]:
                del plain[name]
        return plain

    @property
    def longest(self) -> int:
        """Tokens of the longest request that can be drawn, prompt and output."""
        return self.prompt_tokens[1] + self.output_tokens

    @field_validator("shared_prefix_tokens")
    @classmethod
    def _shorter_than_any_prompt(cls, value: int, info: ValidationInfo) -> int:
        prompts = info.data.get("prompt_tokens")  # absent when it is wrong itself
        if prompts is not None and value >= prompts[0]:
            raise ValueError(f"use less than {prompts[0]}, the shortest prompt of prompt_tokens")
        return value


class Expectation(BaseModel):
    """What must come out of a load. None: not said, so not judged."""

    model_config = STRICT

    verdict: VerdictStatus
    reason: Reason | None = None
    outcome: Outcome | None = None
    truth: Truth | None = None
    tokens: Tokens | None = None

    @field_validator("reason", mode="before")
    @classmethod
    def _reason_of_verdict(cls, value: Any, info: ValidationInfo) -> Reason | None:
        if value is None:
            return None
        verdict = info.data.get("verdict")
        legal: list[Reason] = []
        if verdict in (VerdictStatus.UNVERIFIED, None):
            legal += UnverifiedReason
        if verdict in (VerdictStatus.NOT_CHECKED, None):
            legal += NotCheckedReason
        if not legal:
            raise ValueError(f"a load that is {verdict} has no reason, remove it")
        for reason in legal:
            if value == reason:
                return reason
        raise ValueError(f"{listed(legal)}{did_you_mean(value, legal)}")


class Scenario(BaseModel):
    """One scenario. `faults` holds the parameter models of the kinds (`faults.registry`), not bare `FaultParams`."""

    model_config = STRICT

    schema_version: Annotated[int, one_of(1)]
    name: Name
    summary: OneLine
    incidents: tuple[Incident, ...] = ()
    policies: Annotated[tuple[Policy, ...], Field(min_length=1)] = tuple(Policy)
    topology: Topology = Topology()
    checksum: Checksum = Checksum()
    workload: Workload = Workload()
    faults: tuple[SerializeAsAny[FaultParams], ...] = ()
    expect: Mapping[Policy, Expectation]
    others: Mapping[Policy, Expectation] | None = None
    load_failure: LoadFailurePolicy | None = None
    known_gap: Mapping[Policy, GapId] = Field(default_factory=dict)
    twin: bool = True

    @field_validator("policies")
    @classmethod
    def _each_once(cls, value: tuple[Policy, ...]) -> tuple[Policy, ...]:
        if len(set(value)) < len(value):
            raise ValueError("name each policy once")
        return tuple(policy for policy in Policy if policy in value)

    @field_validator("known_gap", mode="before")
    @classmethod
    def _one_gap_for_all(cls, value: Any, info: ValidationInfo) -> Any:
        """`known_gap: GAP-8` stands for every policy that the scenario runs."""
        if isinstance(value, str):
            return dict.fromkeys(info.data.get("policies", tuple(Policy)), value)
        if not isinstance(value, Mapping):
            raise ValueError("use GAP-n, or a mapping from policies to GAP-n")
        return value

    @property
    def topology_id(self) -> str:
        return self.topology.id

    def to_plain(self) -> dict[str, Any]:
        """Everything as JSON values, faults and defaults included; `from_plain` reads it back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_plain(cls, data: Any) -> Scenario:
        """Read what `to_plain` gave, for a history that is judged again.

        Raises:
            ScenarioError: without lines, for there is no file.
        """
        try:
            json.dumps(data, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"not plain JSON values ({error}): use what to_plain gives"
            raise ScenarioError([Problem("stored scenario", 0, "", message)]) from None
        scenario, _, issues = read_plain(data)
        if scenario is None:
            raise ScenarioError(Problem("stored scenario", 0, field_name(i.loc), i.message) for i in issues)
        return scenario


def read_plain(data: Any) -> tuple[Scenario | None, list[FaultParams | None], list[Issue]]:
    """Validate a scenario as plain values.

    Returns:
        the scenario (None if anything is wrong); its faults, None in the place of each that is wrong; what is wrong.
    """
    if not isinstance(data, dict):
        return None, [], [Issue((), f"the top level is {shown(data)}: use a mapping (key: value)")]
    faults, issues = _read_faults(data.get("faults", []))
    scenario, rest = read_model(Scenario, {key: value for key, value in data.items() if key != "faults"})
    issues += rest
    if scenario is None or issues:
        return None, faults, issues
    return scenario.model_copy(update={"faults": tuple(faults)}), faults, []


def _read_faults(items: Any) -> tuple[list[FaultParams | None], list[Issue]]:
    """Each fault is validated by the model of its kind, which the type of a field cannot say."""
    if not isinstance(items, list):
        return [], [Issue(("faults",), f"faults is {shown(items)}: use a list of faults, each with a kind")]
    faults: list[FaultParams | None] = []
    issues: list[Issue] = []
    for index, item in enumerate(items):
        fault, found = _read_fault(item, ("faults", index))
        faults.append(fault)
        issues += found
        if len(issues) > MAX_ISSUES:
            break
    return faults, issues


def _read_fault(item: Any, loc: Loc) -> tuple[FaultParams | None, list[Issue]]:
    kinds = registry.kinds()
    if not isinstance(item, dict):
        return None, [Issue(loc, f"{field_name(loc)} is {shown(item)}: use a mapping with kind and when")]
    if "kind" not in item:
        return None, [Issue((*loc, "kind"), f"kind is missing: add it and {listed(kinds)}")]
    kind = item["kind"]
    try:
        model = registry.params_model(kind) if isinstance(kind, str) else None
    except ExtensionError as error:
        return None, [Issue((*loc, "kind"), str(error))]
    if model is None:
        advice = f"{listed(kinds)}{did_you_mean(kind, kinds)}"
        return None, [Issue((*loc, "kind"), f"kind is {shown(kind)}: {advice}")]
    return read_model(model, item, loc)
