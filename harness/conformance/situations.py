"""The scenarios of the kit: where clean loads must verify, and what must be noticed on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scenarios.topology import BLOCK_SIZES
from scenarios.words import Policy

Plain = Mapping[str, Any]

LAYOUTS = ("HND", "NHD")
KIT_BLOCK_SIZES = BLOCK_SIZES[:3]
MIXED_BLOCK_SIZES = ((8, 16), (16, 8), (32, 16), (8, 32))

_CLEAN_WORKLOAD: Plain = {"requests": 3, "prompt_tokens": [20, 70], "output_tokens": 6}
_FAULT_WORKLOAD: Plain = {"requests": 2, "prompt_tokens": [40, 60], "output_tokens": 4}
_CLEAN: Plain = {"verdict": "verified", "outcome": "served", "truth": "intact", "tokens": "right"}
_OFF: Plain = {"verdict": "not_checked", "reason": "off", "outcome": "served"}


def _both(**sizes: Any) -> Plain:
    return {"producer": sizes, "consumer": sizes}


# Name -> what differs from the default topology and workload.
SITUATIONS: Mapping[str, Plain] = {
    "prefix hits": {
        "topology": _both(max_num_seqs=1),
        "workload": {"requests": 4, "prompt_tokens": [50, 80], "shared_prefix_tokens": 40},
    },
    "chunked prefill": {"topology": _both(max_batched_tokens=8)},
    "one step in flight": {"topology": _both(steps_in_flight=1)},
    "four steps in flight": {"topology": _both(steps_in_flight=4)},
    "small pools": {
        "topology": {
            "producer": {"block_size": 8, "num_blocks": 10},
            "consumer": {"block_size": 8, "num_blocks": 14, "steps_in_flight": 3},
        },
        "workload": {"requests": 6, "prompt_tokens": [30, 40], "output_tokens": 24},
    },
    "prompts of whole blocks": {"workload": {"prompt_tokens": [32, 32]}},
    "prompts of one token": {"workload": {"prompt_tokens": [1, 1]}},
    "another model and dtype": {"topology": {"model": "small", "kv_dtype": "float16"}},
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of the transport, what D must say of the load, and a hint for where the fault leaves no evidence."""

    fault: Plain
    verdict: str
    truth: str
    hint: str
    competitors: int = 0

    @property
    def harmless(self) -> bool:
        return self.verdict == "verified"


def _fault(kind: str, at: str, **params: Any) -> Plain:
    return {"kind": kind, "when": {"load": 2, "at": at}, **params}


_LEASES = "does its scheduler side have holds_lease and end_lease?"
_FABRIC = "does it move every byte by operations that it posts on the fabric?"

TROUBLES: Mapping[str, Trouble] = {
    "a bit flips on P after it was summed": Trouble(_fault("bit_flip", "after_checksum"), "mismatch", "corrupted", ""),
    "a bit flips on D before it is checked": Trouble(_fault("bit_flip", "before_verify"), "mismatch", "corrupted", ""),
    "one block arrives": Trouble(_fault("short_transfer", "in_flight"), "mismatch", "corrupted", _FABRIC),
    "nothing arrives": Trouble(_fault("short_transfer", "in_flight", moved_blocks=0), "mismatch", "corrupted", _FABRIC),
    "P's blocks are reused before the read": Trouble(
        _fault("early_reuse", "before_read"), "mismatch", "corrupted", _LEASES, competitors=1
    ),
    "P's blocks are reused during the read": Trouble(
        _fault("early_reuse", "mid_read"), "mismatch", "corrupted", _LEASES, competitors=1
    ),
    "P's blocks are reused after the read": Trouble(
        _fault("early_reuse", "after_read"), "verified", "intact", _LEASES, competitors=1
    ),
    "the checksums are lost": Trouble(
        _fault("drop_checksums", "params_pass"),
        "unverified",
        "intact",
        "does its scheduler side name a carrier (kv_checksum_carrier) for requests that P sends?",
    ),
}

TROUBLE_CELLS = [
    (name, policy)
    for name, trouble in TROUBLES.items()
    for policy in Policy
    if policy is not Policy.OFF or trouble.verdict != "unverified"  # without checksums there are none to lose
]


def clean_scenario(policy: Policy, topology: Plain, workload: Plain | None = None) -> dict[str, Any]:
    """No fault: every load verifies and is right."""
    return {
        "schema_version": 1,
        "name": "clean",
        "summary": "No fault.",
        "policies": [str(policy)],
        "topology": topology,
        "workload": {**_CLEAN_WORKLOAD, **(workload or {})},
        "expect": {str(policy): {**_CLEAN, **_OFF} if policy is Policy.OFF else _CLEAN},
        "twin": False,
    }


def trouble_scenario(name: str, policy: Policy) -> dict[str, Any]:
    """One of `TROUBLES` on the second of two loads."""
    trouble = TROUBLES[name]
    return {
        "schema_version": 1,
        "name": "trouble",
        "summary": name,
        "policies": [str(policy)],
        "topology": {"producer": {"layout": "HND", "num_blocks": 10}, "consumer": {"layout": "NHD", "num_blocks": 12}},
        "workload": {**_FAULT_WORKLOAD, "competitors": trouble.competitors},
        "faults": [trouble.fault],
        "expect": {str(policy): _expected(trouble, policy)},
        "twin": False,
    }


def _expected(trouble: Trouble, policy: Policy) -> Plain:
    if policy is Policy.OFF:
        return {**_OFF, "truth": trouble.truth}
    outcomes = {Policy.FAIL_OPEN: "served", Policy.FAIL_CLOSED_FAIL: "failed"}
    outcome = "served" if trouble.harmless else outcomes.get(policy, "recomputed")
    expected = {"verdict": trouble.verdict, "outcome": outcome, "truth": trouble.truth}
    right = outcome == "recomputed" or (outcome == "served" and trouble.truth == "intact")
    return {**expected, "tokens": "right"} if right else expected
