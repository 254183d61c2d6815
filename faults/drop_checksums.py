"""The checksums are lost, cut or altered on their way from P to D, by the proxy or in the connector's own messages.

Recipe S14 of docs/incidents.md (a to d); GAP-9: the payload carries no check of its own, so another one that is well
formed passes for P's. shorten makes what an honest P would send that never computed the last block (GAP-12). Version 2
has a check, which stays as P made it unless the fault stands for P.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Literal

from pydantic import Field

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.payload import CHECK_BYTES, HARDENED, Payload, PayloadLimits, decode, encode
from engine.seams import CarrierPass, Change, ParamsPass, Seams
from faults.base import Fault, FaultParams, When, digest
from faults.levers import CHECKSUMS
from faults.moments import MOMENTS

_VERSION_BYTE = 1  # msgpack of the payload: array header, then the version
_CHECK_FIELD_BYTES = 2 + CHECK_BYTES  # of version 2, at the end: a bin header and the check


class DropChecksumsWhen(When):
    at: Literal["params_pass", "carrier_pass"] = Field(
        "params_pass",
        description="params_pass: the proxy forwards the parameters. carrier_pass: the connector brings the checksums "
        "with its own messages, as in a push.",
    )


class DropChecksumsParams(FaultParams):
    kind: Literal["drop_checksums"]
    when: DropChecksumsWhen
    how: Literal["lose", "cut", "alter_version", "alter_value", "alter_num_tokens", "alter_tp_size", "shorten"] = Field(
        "lose",
        description="lose: the key is gone. cut: only the first half of the text. alter_version, alter_value: one "
        "character changes, in the version or in the checksum of a block. alter_num_tokens: one token less, so that "
        "the last block is not compared. alter_tp_size: a field that nothing uses. shorten: without the last block, "
        "its checksum and its tokens.",
    )


class DropChecksums(Fault[DropChecksumsParams]):
    """Acts on the checksums of one request as they pass."""

    kind = "drop_checksums"
    params_model = DropChecksumsParams

    @classmethod
    def needs(cls, params: FaultParams) -> frozenset[str]:
        return frozenset({MOMENTS[params.when.at], CHECKSUMS})

    def attach(self, seams: Seams) -> None:
        by_proxy = self.params.when.at == "params_pass"
        seams.on(MOMENTS[self.params.when.at], self._pass if by_proxy else self._pass_carrier)

    def _pass(self, event: ParamsPass) -> Change[ParamsPass] | None:
        text = event.params.get(CHECKSUMS_PARAM)
        if event.request_id != self.context.request_id or not isinstance(text, str):
            return None
        altered = self._spoil(text)
        if altered == text:
            return None
        params = {key: value for key, value in event.params.items() if key != CHECKSUMS_PARAM}
        return Change(ParamsPass(event.request_id, params if altered is None else params | {CHECKSUMS_PARAM: altered}))

    def _pass_carrier(self, event: CarrierPass) -> Change[CarrierPass] | None:
        if event.request_id != self.context.request_id or event.checksums is None:
            return None
        altered = self._spoil(event.checksums)
        return None if altered == event.checksums else Change(replace(event, checksums=altered))

    def _spoil(self, text: str) -> str | None:
        """What arrives in place of the text, with evidence if that is something else; None: nothing."""
        altered = self._alter(text)
        if altered != text:
            after = None if altered is None else digest(altered.encode())
            self.record(MOMENTS[self.params.when.at], self._describe(text, altered), digest(text.encode()), after)
        return altered

    def _alter(self, text: str) -> str | None:
        if self.params.how == "lose":
            return None
        if self.params.how == "cut":
            return text[: len(text) // 2]
        raw = bytearray(base64.b64decode(text))
        check = _CHECK_FIELD_BYTES if raw[_VERSION_BYTE] == HARDENED else 0
        if self.params.how in _REWRITE:
            altered = encode(_REWRITE[self.params.how](decode(text, _ANY)))
            if not check or self.params.how in _BY_PRODUCER:
                return altered
            # What changes on the way keeps the check that P made.
            raw = bytearray(base64.b64decode(altered)[:-check] + raw[-check:])
        elif self.params.how == "alter_version":
            raw[_VERSION_BYTE] ^= 1 << self.context.rng.randrange(1, 6)
        else:
            # The payload, but for its check, ends with the values of its last group: 8 bytes a block, at least one.
            raw[-check - self.context.rng.randrange(1, 9)] ^= 1 << self.context.rng.randrange(8)
        return base64.b64encode(raw).decode("ascii")

    def _describe(self, text: str, altered: str | None) -> str:
        if altered is None:
            return f"{CHECKSUMS_PARAM} ({len(text)} characters) is gone"
        if self.params.how in _REWRITE:
            return f"{CHECKSUMS_PARAM} is written anew: {self.params.how}"
        if len(altered) < len(text):
            return f"{CHECKSUMS_PARAM} is cut from {len(text)} to {len(altered)} characters"
        changed = [index for index, (old, new) in enumerate(zip(text, altered, strict=True)) if old != new]
        return f"{CHECKSUMS_PARAM} is altered at character {', '.join(map(str, changed))} of {len(text)}"


def _one_token_less(payload: Payload) -> Payload:
    return replace(payload, num_tokens=max(1, payload.num_tokens - 1))


def _other_tp_size(payload: Payload) -> Payload:
    return replace(payload, tp_size=payload.tp_size + 1)


def _without_last_block(payload: Payload) -> Payload:
    """As if P had never computed the last block. A payload of one block has nothing to leave out."""
    whole = min((payload.num_tokens - 1) // group.block_size * group.block_size for group in payload.groups)
    groups = tuple(
        replace(group, values=group.values[: whole // group.block_size - group.start]) for group in payload.groups
    )
    return replace(payload, num_tokens=whole, groups=groups) if whole else payload


_ANY = PayloadLimits(max_base64=2**32, max_groups=256, max_num_tokens=2**63)
_REWRITE = {
    "alter_num_tokens": _one_token_less,
    "alter_tp_size": _other_tp_size,
    "shorten": _without_last_block,
}
_BY_PRODUCER = ("shorten",)
