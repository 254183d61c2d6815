"""What both sides of a connector promise the engine: carriers, leases, and failures that are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.policy import LoadFailurePolicy
from engine.checksum.verdict import NotCheckedReason
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.base import SchedulerConnector
from engine.connectors.registry import ConnectorFactory
from engine.kv_manager import GROUP
from engine.request import FinishReason, Request
from harness.conformance.pair import LEASE_TICKS, Pair, make_prompt, tokens_alone


def carrier_trouble(factory: ConnectorFactory) -> str | None:
    """CAR-1, CAR-3, CAR-4: which requests carry checksums."""
    return "\n".join(_carrier_troubles(factory)) or None


def _carrier_troubles(factory: ConnectorFactory) -> Iterator[str]:
    config = EngineConfig("p", lease_ticks=LEASE_TICKS)
    side = factory.scheduler(config, VirtualClock())
    if not isinstance(side, SchedulerConnector):
        yield f"scheduler() gives a {type(side).__name__}, no subclass of SchedulerConnector."
        return
    if not side.has_carrier():
        yield (
            "It does not override kv_checksum_carrier: it can verify no load, so fail-closed engines refuse to start "
            "with it and others disable checksums (CAR-3)."
        )
        return
    plain = Request("plain", [1, 2], 1)
    sends = Request("sends", [1, 2], 1, {"do_remote_decode": True})
    answer = side.request_finished(sends, {GROUP: [1]})
    if side.request_finished(plain, {GROUP: [2]}) is not None:
        yield "request_finished holds the blocks of a request without do_remote_decode."
    if answer is None:
        yield "request_finished gives nothing for a request with do_remote_decode."
        return
    if answer.get("do_remote_prefill") is not True or answer.get("do_remote_decode"):
        yield "request_finished must tell D do_remote_prefill: True, and not do_remote_decode: D would start no load."
    if CHECKSUMS_PARAM in answer:
        yield f"request_finished gives {CHECKSUMS_PARAM}: generic code adds it, a connector computes nothing (CAR-1)."
    loads = Request("loads", [1, 2], 1, answer)
    wanted: list[tuple[str, Request, bool, bool]] = [
        ("a request that P sends", sends, False, True),
        ("a regular load on D", loads, True, True),
        ("a request without transfer, on P", plain, False, False),
        ("a request without transfer, on D", plain, True, False),
        ("a request that P sends, as if D loaded it", sends, True, False),
    ]
    for what, request, receiving, carries in wanted:
        if (side.kv_checksum_carrier(request, receiving) is not None) is not carries:
            yield f"kv_checksum_carrier must name {'a carrier' if carries else 'none'} for {what} (CAR-1)."


def lease_trouble(factory: ConnectorFactory) -> str | None:
    """P holds blocks until they are read, or until the lease has ended by time or by hand."""
    return "\n".join(_lease_troubles(factory)) or None


def _lease_troubles(factory: ConnectorFactory) -> Iterator[str]:
    for how in ("by time", "by hand"):
        pair = Pair(factory)
        side = pair.producer.connector
        if side is None or pair.prefill("r", make_prompt(57)) is None:
            yield "P names no parameters for the consumer of a prompt that it was sent with do_remote_decode."
            return
        if not pair.held(pair.producer) or side.num_leases != 1 or not side.holds_lease("r"):
            yield "P must hold a request's blocks for its consumer, and say so (num_leases, holds_lease)."
            return
        if how == "by time":
            pair.clock.advance(LEASE_TICKS + 1)
        else:
            side.end_lease("r")
        pair.settle_producer()
        if pair.held(pair.producer) or side.num_leases or side.holds_lease("r"):
            yield f"A lease that has ended {how} still holds {pair.held(pair.producer)} of P's blocks (expired)."
        if side.sent("r"):
            yield f"sent() takes a notice for a lease that has ended {how}: P would free the blocks a second time."
    pair = Pair(factory)
    prompt = make_prompt(57)
    pair.load("r", prompt, pair.prefill("r", prompt) or {})
    pair.settle_producer()
    if pair.held(pair.producer):
        yield f"D has read the request, and P still holds {pair.held(pair.producer)} blocks: it must be told (sent)."


def failure_trouble(factory: ConnectorFactory, load_failure: LoadFailurePolicy, **pair_options: Any) -> str | None:
    """A load that cannot work must be reported as failed, and end as `load_failure` says."""
    pair, prompt = Pair(factory, load_failure=load_failure, **pair_options), make_prompt(57)
    params = pair.prefill("r", prompt)
    try:
        answer = pair.load("r", prompt, params or {})
    except Exception as error:  # noqa: BLE001 - whatever it raises ends the engine
        return f"The engine stopped with {type(error).__name__}: {error}"
    if answer is None:
        return "D never answered: failed_receiving must name a load that cannot work."
    if pair.held(pair.consumer):
        return f"{pair.held(pair.consumer)} of D's blocks never came back."
    if answer.verdict.reason not in (NotCheckedReason.LOAD_FAILED, NotCheckedReason.OFF):
        return f"The verdict is {answer.verdict.status} ({answer.verdict.reason}), not that of a failed load."
    if load_failure == "fail":
        return None if answer.finish_reason is FinishReason.ERROR else "The load was reported as finished: D went on."
    if not answer.recomputed:
        return "The load was reported as finished: D did not compute the prompt itself."
    return None if answer.token_ids == tokens_alone(prompt) else "D computed the prompt itself, and got other tokens."
