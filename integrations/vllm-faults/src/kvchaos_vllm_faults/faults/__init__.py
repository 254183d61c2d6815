"""The faults, by the names that kvchaos' scenarios call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvchaos_vllm_faults.evidence import Evidence
from kvchaos_vllm_faults.faults.base import Fault, Order, OrderError
from kvchaos_vllm_faults.faults.bit_flip import BitFlip
from kvchaos_vllm_faults.faults.drop_checksums import DropChecksums
from kvchaos_vllm_faults.faults.early_reuse import EarlyReuse
from kvchaos_vllm_faults.faults.layout_mismatch import LayoutMismatch
from kvchaos_vllm_faults.faults.misplace import misplace
from kvchaos_vllm_faults.faults.noop import Noop
from kvchaos_vllm_faults.faults.short_transfer import ShortTransfer
from kvchaos_vllm_faults.faults.swap_params import SwapParams

FAULTS: Mapping[str, Callable[[Order, Callable[[Evidence], None]], Fault]] = {
    "noop": Noop,
    "bit_flip": BitFlip,
    "drop_checksums": DropChecksums,
    "early_reuse": EarlyReuse,
    "layout_mismatch": LayoutMismatch,
    "misplace": misplace,
    "short_transfer": ShortTransfer,
    "swap_params": SwapParams,
}


def make(order: Order, record: Callable[[Evidence], None]) -> Fault:
    """The fault of an order.

    Raises:
        OrderError: there is no such kind, or it cannot follow the order.
    """
    if order.kind not in FAULTS:
        raise OrderError(f"there is no fault {order.kind!r} for vLLM: there are {', '.join(FAULTS)}")
    return FAULTS[order.kind](order, record)


__all__ = ["FAULTS", "Fault", "Order", "OrderError", "make"]
