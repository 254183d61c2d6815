"""Keeps NIXL's progress thread from taking a whole core while nothing moves: on a small machine two engines, each with
such a thread, are mostly that.

The thread waits for an event of the transport, but no longer than the agent's delay, and NIXL's Python API fixes the
delay at 0. This is for test machines: a deployment's agents are vLLM's business.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)
# An event ends the wait at once. NIXL's own comment says that UCX may miss one: then it is this long until it looks.
PROGRESS_US = 1000


def wait_for_events() -> None:
    """Give every agent that this process makes a delay; of a NIXL that is built otherwise, leave them as they are."""
    # As vLLM sets it before it imports NIXL, for it is read then.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        from nixl._api import nixlBind
    except ImportError as error:
        logger.info("NIXL's progress threads take what they take: %s", error)
        return
    config: Any = getattr(nixlBind, "nixlAgentConfig", None)
    if not hasattr(config, "pthrDelay"):
        logger.info("this NIXL takes no delay: its progress threads take what they take")
        return

    class Patient(config):  # type: ignore[misc] # NIXL has no types
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, max(PROGRESS_US, int(str(value))) if name == "pthrDelay" else value)

    nixlBind.nixlAgentConfig = Patient
