"""The fault kinds by name: kvchaos' own, and those of other distributions (docs/extending.md)."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from engine.extensions import Registry
from faults.base import Fault, FaultParams, When
from faults.bit_flip import BitFlip
from faults.cancelling import Cancelling
from faults.consumer_reuse import ConsumerReuse
from faults.double_read import DoubleRead
from faults.drop_checksums import DropChecksums
from faults.early_reuse import EarlyReuse
from faults.false_success import FalseSuccess
from faults.kill_producer import KillProducer
from faults.layout_mismatch import LayoutMismatch
from faults.local_prefix import LocalPrefix
from faults.misplace import Misplace
from faults.moments import MOMENTS
from faults.noop import Noop
from faults.partition import Partition
from faults.pause_producer import PauseProducer
from faults.reset_connection import ResetConnection
from faults.restart_consumer import RestartConsumer
from faults.short_transfer import ShortTransfer
from faults.slow_link import SlowLink
from faults.swap_params import SwapParams

GROUP = "kvchaos.faults"
API_VERSION = 1

_KINDS: tuple[type[Fault[Any]], ...] = (
    Noop,
    BitFlip,
    Cancelling,
    ConsumerReuse,
    DoubleRead,
    DropChecksums,
    EarlyReuse,
    FalseSuccess,
    KillProducer,
    LayoutMismatch,
    LocalPrefix,
    Misplace,
    Partition,
    PauseProducer,
    ResetConnection,
    RestartConsumer,
    ShortTransfer,
    SlowLink,
    SwapParams,
)
_OWN: dict[str, type[Fault[Any]]] = {fault.kind: fault for fault in _KINDS}
PARAMS: dict[str, type[FaultParams]] = {kind: fault.params_model for kind, fault in _OWN.items()}


def _check(extension: Any) -> str | None:
    """What is wrong with a fault kind of another distribution."""
    if not (inspect.isclass(extension) and issubclass(extension, Fault)):
        return "is no subclass of faults.base.Fault: let the entry point name the class"
    if missing := sorted(extension.__abstractmethods__):
        return f"does not define {', '.join(missing)}"
    params = getattr(extension, "params_model", None)
    if not (inspect.isclass(params) and issubclass(params, FaultParams)):
        return "has no params_model, a subclass of faults.base.FaultParams"
    if get_args(params.model_fields["kind"].annotation) != (extension.kind,):
        return f'has a params_model whose kind is not Literal["{extension.kind}"]'
    moments = moments_of(params)
    if not moments or not set(moments) <= MOMENTS.keys():
        return f"has a params_model whose when.at is no Literal of moments ({', '.join(MOMENTS)})"
    return None if vars(extension).get("__doc__") else "has no docstring, whose first line is its summary"


def moments_of(params: type[FaultParams]) -> tuple[str, ...]:
    """The moments that `when.at` may name."""
    when = params.model_fields["when"].annotation
    return get_args(when.model_fields["at"].annotation) if inspect.isclass(when) and issubclass(when, When) else ()


FAULTS: Registry[type[Fault[Any]]] = Registry(GROUP, "fault", API_VERSION, _OWN, _check, name_attribute="kind")


def params_model(kind: str) -> type[FaultParams] | None:
    """The parameter model of a kind, or None if no such kind exists.

    Raises:
        ExtensionError: it is an installed distribution's, and cannot be used.
    """
    if kind in FAULTS.installed:
        PARAMS[kind] = FAULTS.choose(kind).params_model
    return PARAMS.get(kind)


def kinds() -> list[str]:
    """Every kind that a scenario may name. None is imported for it."""
    return sorted({*PARAMS, *FAULTS.installed})
