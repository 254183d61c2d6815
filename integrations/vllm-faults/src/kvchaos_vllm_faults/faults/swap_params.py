"""D gets the parameters of another load: all of them, only the block ids, or only the checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kvchaos_vllm_faults.blocks import PARAMS_PASS
from kvchaos_vllm_faults.evidence import Evidence, digest
from kvchaos_vllm_faults.faults.base import Fault, Order, OrderError

_PARTS = {"whole": None, "ids_only": "remote_block_ids", "checksums_only": "kv_checksums"}


class SwapParams(Fault):
    """Puts another load's parameters (`Order.other`) in the place of this load's."""

    kind = "swap_params"
    moments: ClassVar[Mapping[str, str]] = {"params_pass": PARAMS_PASS}

    def __init__(self, order: Order, record: Callable[[Evidence], None]) -> None:
        super().__init__(order, record)
        self._how = order.params.get("how") or "whole"
        if self._how not in _PARTS:
            raise OrderError(f"{self.kind} knows {', '.join(_PARTS)}, not how: {self._how}")
        if order.other is None:
            raise OrderError(f"{self.kind} needs the parameters of the other load")
        self._theirs = order.other

    def on_params(self, params: Mapping[str, Any], num_blocks: int) -> Mapping[str, Any]:
        part = _PARTS[self._how]
        swapped = dict(self._theirs)
        if part is not None:
            swapped = {**params, **{key: value for key, value in self._theirs.items() if key == part}}
        before, after = _digest(params), _digest(swapped)
        if before != after:
            self.record(f"{part or 'all parameters'} of another load take the place of the load's own", before, after)
        return swapped


def _digest(params: Mapping[str, Any]) -> str:
    return digest(json.dumps(dict(params), sort_keys=True, default=str).encode())
