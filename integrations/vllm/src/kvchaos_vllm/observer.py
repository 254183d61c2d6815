"""Who wants to hear of each judged load: a test harness, or an operator's own hook. Costs nothing when nobody does.

Callbacks run in the process and thread of D's scheduler, once a load, before the request can be scheduled. One that
raises is logged and goes on being called: a bug in it must not change what is served.
"""

from __future__ import annotations

from collections.abc import Callable

from kvchaos_vllm.log import get_logger
from kvchaos_vllm.verdict import Verdict

logger = get_logger(__name__)
Callback = Callable[[str, Verdict], None]
_callbacks: list[Callback] = []


def subscribe(callback: Callback) -> None:
    """Call it with the request id and the verdict of every load judged in this process from now on."""
    _callbacks.append(callback)


def unsubscribe(callback: Callback) -> None:
    """Stop calling it.

    Raises:
        ValueError: it was not subscribed.
    """
    _callbacks.remove(callback)


def notify(request_id: str, verdict: Verdict) -> None:
    """Tell everybody who subscribed."""
    for callback in tuple(_callbacks):
        try:
            callback(request_id, verdict)
        except Exception:
            logger.exception("request %s: %r raised on the verdict of its load", request_id, callback)
