"""What ties the parts of a scenario together: does the longest request fit, do loads and policies exist.

A check runs when the parts that it reads are sound, so that one broken part does not hide problems of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from engine.numerics import MAX_CONTEXT
from engine.presets import preset
from faults.base import FaultParams
from scenarios.problems import Issue
from scenarios.schema import Scenario
from scenarios.wording import read_model
from scenarios.words import Policy

_PLACEHOLDER: Mapping[str, Any] = {"schema_version": 1, "name": "draft", "summary": "draft", "expect": {}}


def cross_issues(data: Mapping[str, Any], faults: Sequence[FaultParams | None], issues: Sequence[Issue]) -> list[Issue]:
    """Problems between the parts of a scenario.

    Args:
        data: the scenario as plain values.
        faults: as `read_plain` gave them; None for a fault that is wrong itself.
        issues: what `read_plain` found; parts that are in here are not judged again.
    """
    broken = {str(issue.loc[0]) for issue in issues if issue.loc}
    sound = {key: value for key, value in data.items() if key not in broken and key != "faults"}
    draft, _ = read_model(Scenario, {**_PLACEHOLDER, **sound})
    if draft is None:  # so much is wrong that not all of it was listed
        return []
    found: list[Issue] = []
    if "topology" not in broken:
        found += _ranks(draft)
    if not {"topology", "workload"} & broken:
        found += _room(draft)
    if "workload" not in broken:
        found += _fault_loads(draft.workload.requests, faults)
    if "topology" not in broken:
        found += _carriers(draft.topology.transfer, faults)
    if not {"policies", "expect"} & broken:
        found += _expectations(draft)
    if "policies" not in broken:
        found += _optional_policies(draft, data, broken)
    return found


def _ranks(scenario: Scenario) -> Iterator[Issue]:
    """The model must be one that each side's ranks can share."""
    topology = scenario.topology
    for name, side in (("producer", topology.producer), ("consumer", topology.consumer)):
        wrong = preset(topology.model).why_unshardable(side.tp, side.pp)
        if wrong is not None:
            yield Issue(("topology", name, wrong.split()[0]), wrong, (("topology", "model"),))


def _room(scenario: Scenario) -> Iterator[Issue]:
    """Each side must be able to hold the longest request alone, else it would wait for blocks forever."""
    workload, topology = scenario.workload, scenario.topology
    need = workload.longest
    request = f"the longest request needs {need} ({workload.prompt_tokens[1]} prompt + {workload.output_tokens} output)"
    written = (("workload", "prompt_tokens"), ("workload", "output_tokens"), ("workload",))
    if need > MAX_CONTEXT:
        message = f"{request}, but an engine computes at most {MAX_CONTEXT}: lower prompt_tokens or output_tokens"
        yield Issue(("workload", "prompt_tokens"), message, written)
    for name, side in (("producer", topology.producer), ("consumer", topology.consumer)):
        capacity = topology.capacity(side)
        if capacity < need:
            holds = f"{side.num_blocks}, which hold {capacity} tokens in blocks of {side.block_size} (one is null)"
            blocks = topology.blocks_for(side, need)
            message = f"num_blocks is {holds}, but {request}: use at least {blocks}"
            yield Issue(("topology", name, "num_blocks"), message, written)
        limit = side.max_model_len
        if limit is not None and limit < need:
            message = f"max_model_len is {limit}, but {request}: use at least {need}"
            yield Issue(("topology", name, "max_model_len"), message, written)
        if limit is not None and limit > MAX_CONTEXT:
            message = f"max_model_len is {limit}, but an engine computes at most {MAX_CONTEXT}: lower it"
            yield Issue(("topology", name, "max_model_len"), message, written)
        if limit is not None and limit > capacity:
            message = f"max_model_len is {limit}, but num_blocks hold {capacity} tokens: leave it out or lower it"
            yield Issue(("topology", name, "max_model_len"), message, written)


def _fault_loads(requests: int, faults: Sequence[FaultParams | None]) -> Iterator[Issue]:
    for index, fault in enumerate(faults):
        if fault is None:
            continue
        named = {("when", "load"): fault.when.load, ("other_load",): getattr(fault, "other_load", None)}
        for field, load in named.items():
            if load is not None and load > requests:
                message = f"{field[-1]} is {load}, but workload.requests is {requests}: use 1 to {requests}"
                yield Issue(("faults", index, *field), message)


def _carriers(transfer: str, faults: Sequence[FaultParams | None]) -> Iterator[Issue]:
    """Checksums pass with the parameters in a pull, and with the connector's own messages in a push."""
    for index, fault in enumerate(faults):
        if fault is None:
            continue
        at = fault.when.at
        if at == "carrier_pass" and transfer != "push":
            message = f"at is {at}, but in a {transfer} the proxy brings the checksums: use params_pass"
            yield Issue(("faults", index, "when", "at"), message)
        if at == "params_pass" and fault.kind == "drop_checksums" and transfer == "push":
            message = f"at is {at}, but in a {transfer} the connector brings the checksums: use carrier_pass"
            yield Issue(("faults", index, "when", "at"), message)


def _expectations(scenario: Scenario) -> Iterator[Issue]:
    missing = [policy for policy in scenario.policies if policy not in scenario.expect]
    if missing:
        names = ", ".join(missing)
        yield Issue(("expect",), f"expect lacks {names}: add them, or name the policies to run under policies")
    yield from _not_run(scenario, "expect", scenario.expect)


def _optional_policies(scenario: Scenario, data: Mapping[str, Any], broken: Collection[str]) -> Iterator[Issue]:
    if "others" not in broken and scenario.others is not None:
        yield from _not_run(scenario, "others", scenario.others)
    if "known_gap" not in broken and isinstance(data.get("known_gap"), dict):
        yield from _not_run(scenario, "known_gap", scenario.known_gap)


def _not_run(scenario: Scenario, part: str, mapping: Mapping[Policy, Any]) -> Iterator[Issue]:
    for policy in mapping:
        if policy not in scenario.policies:
            yield Issue((part, policy.value), f"{policy} is not in policies: remove it here, or add it there")
