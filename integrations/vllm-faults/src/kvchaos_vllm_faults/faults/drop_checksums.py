"""The checksums are lost, cut or altered on their way from P to D: the parameters pass a proxy, and it spoils them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgpack

from kvchaos_vllm_faults.blocks import PARAMS_PASS
from kvchaos_vllm_faults.evidence import Evidence, digest
from kvchaos_vllm_faults.faults.base import Fault, Order, OrderError

CHECKSUMS = "kv_checksums"
_VERSION_BYTE = 1  # msgpack of the payload: array header, then the version
_VERSION, _TP_SIZE, _NUM_TOKENS, _GROUPS = range(4)
_BLOCK_SIZE, _START, _VALUES = 2, 3, 4


class DropChecksums(Fault):
    """Acts on the checksums of one request as its parameters arrive on D."""

    kind = "drop_checksums"
    moments: ClassVar[Mapping[str, str]] = {"params_pass": PARAMS_PASS}
    hows = ("lose", "cut", "alter_version", "alter_value", "alter_num_tokens", "alter_tp_size", "shorten")

    def __init__(self, order: Order, record: Callable[[Evidence], None]) -> None:
        super().__init__(order, record)
        self._how = order.params.get("how") or "lose"
        if self._how not in self.hows:
            raise OrderError(f"{self.kind} knows {', '.join(self.hows)}, not how: {self._how}")

    def on_params(self, params: Mapping[str, Any], num_blocks: int) -> Mapping[str, Any]:
        text = params.get(CHECKSUMS)
        if not isinstance(text, str):
            return params
        altered = self._alter(text)
        if altered == text:
            return params
        after = None if altered is None else digest(altered.encode())
        self.record(self._describe(text, altered), digest(text.encode()), after)
        rest = {key: value for key, value in params.items() if key != CHECKSUMS}
        return rest if altered is None else rest | {CHECKSUMS: altered}

    def _alter(self, text: str) -> str | None:
        if self._how == "lose":
            return None
        if self._how == "cut":
            return text[: len(text) // 2]
        raw = bytearray(base64.b64decode(text))
        if self._how == "alter_version":
            raw[_VERSION_BYTE] ^= 1 << self.rng.randrange(1, 6)
        elif self._how == "alter_value":
            # The payload ends with the values of its last group: 8 bytes a block, at least one.
            raw[-self.rng.randrange(1, 9)] ^= 1 << self.rng.randrange(8)
        else:
            raw = bytearray(msgpack.packb(self._rewritten(msgpack.unpackb(bytes(raw)))))
        return base64.b64encode(raw).decode("ascii")

    def _rewritten(self, payload: list[Any]) -> list[Any]:
        if self._how == "alter_tp_size":
            payload[_TP_SIZE] += 1
        elif self._how == "alter_num_tokens":
            payload[_NUM_TOKENS] = max(1, payload[_NUM_TOKENS] - 1)
        else:
            # As if P had never computed the last block. A payload of one block has nothing to leave out.
            whole = min((payload[_NUM_TOKENS] - 1) // g[_BLOCK_SIZE] * g[_BLOCK_SIZE] for g in payload[_GROUPS])
            if whole:
                payload[_NUM_TOKENS] = whole
                for group in payload[_GROUPS]:
                    group[_VALUES] = group[_VALUES][: 8 * (whole // group[_BLOCK_SIZE] - group[_START])]
        return payload

    def _describe(self, text: str, altered: str | None) -> str:
        if altered is None:
            return f"{CHECKSUMS} ({len(text)} characters) is gone"
        if len(altered) < len(text) and self._how == "cut":
            return f"{CHECKSUMS} is cut from {len(text)} to {len(altered)} characters"
        return f"{CHECKSUMS} is altered: {self._how}"
