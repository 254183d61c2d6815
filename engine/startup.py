"""What an engine can keep of the checksum policy that it is asked for, decided before it serves any (CAR-3, CAR-5).

Some things cannot work at all and are refused. Others are left out of the protocol: checksums are then disabled, which
is logged and holds under fail-closed too (GAP-13).
"""

from __future__ import annotations

import logging

from engine.checksum.policy import ChecksumPolicy, resolve
from engine.config import EngineConfig
from engine.connectors.base import SchedulerConnector
from engine.errors import StartupError

logger = logging.getLogger(__name__)


def usable_policy(config: EngineConfig, connector: SchedulerConnector | None) -> ChecksumPolicy:
    """The policy that this engine can keep.

    Raises:
        StartupError: contradictory flags; fail-closed with a connector that carries no checksums; a speculator after
            which nothing can be checksummed.
    """
    policy = resolve(config.checksum)
    if not policy.enabled:
        return policy
    if config.speculator is not None and not config.checksums_after_speculator:
        raise StartupError(
            f"engine {config.engine_id}: KV checksums with the speculator {config.speculator}: this runner cannot "
            "checksum after the speculator has written: turn one of the two off"
        )
    carrierless = _without_carrier(connector)
    if carrierless is not None and policy.fail_closed:
        raise StartupError(
            f"engine {config.engine_id}: fail-closed KV checksums, but {carrierless}: no load could ever be verified; "
            "use a connector with a carrier, or fail-open"
        )
    unsupported = carrierless or _unsupported(config)
    if unsupported is None:
        return policy
    logger.warning("engine %s: KV checksums are disabled, %s", config.engine_id, unsupported)
    return ChecksumPolicy(enabled=False, fail_closed=False, load_failure=policy.load_failure)


def _without_carrier(connector: SchedulerConnector | None) -> str | None:
    """Why nothing can carry checksums (CAR-3)."""
    if connector is None:
        return "has no connector"
    return None if connector.has_carrier() else f"{type(connector).__name__} carries no checksums"


def _unsupported(config: EngineConfig) -> str | None:
    """What the protocol leaves out (CAR-5)."""
    if config.dcp_size > 1 or config.pcp_size > 1:
        return f"it has context parallelism (dcp {config.dcp_size}, pcp {config.pcp_size})"
    if config.pp_size > 1 and not config.collects_all_stages:
        return f"only the last of its {config.pp_size} pipeline stages reports to the scheduler"
    return None
