"""Keeps NIXL's progress thread from taking a whole core while nothing moves.

That thread waits for an event of the transport, but no longer than the agent's delay, and NIXL's Python API fixes the
delay at 0: it never waits at all. On a machine whose cores are all wanted, two such threads beside a prefill are what
its time is made of.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)
# An event ends the wait at once. NIXL's own comment says that UCX may miss one: then it is this long until it looks.
PROGRESS_US = 1000


@contextlib.contextmanager
def waiting_for_events(agent_class: Any) -> Iterator[None]:
    """Within this block, agents of this class are made with a delay; of a NIXL that is built otherwise, as they are."""
    bindings: Any = getattr(sys.modules.get(agent_class.__module__), "nixlBind", None)
    config = getattr(bindings, "nixlAgentConfig", None)
    if not hasattr(config, "pthrDelay"):
        logger.debug("this NIXL takes no delay: its progress thread takes what it takes")
        yield
        return

    class Patient(config):  # type: ignore[misc, valid-type] # NIXL has no types
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, max(PROGRESS_US, int(str(value))) if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config
