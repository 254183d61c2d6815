"""What an engine can keep of the checksum policy that it is asked for, decided before it serves any (CAR, POL-1).

Some things cannot work at all and are refused. Where checks would only be missing, an engine that fails open starts
without checksums and says so, and one that fails closed refuses: a deployment that means to be protected must not
start unprotected.
"""

from __future__ import annotations

from typing import Any

from kvchaos_vllm.errors import StartupError
from kvchaos_vllm.log import get_logger
from kvchaos_vllm.settings import DISABLED, ChecksumPolicy, ChecksumSettings, resolve

logger = get_logger(__name__)
TESTED = "0.32."
"""The versions of vLLM that this package's tests have passed with begin so."""


def warn_of_version(version: str) -> None:
    """Warn where vLLM is of a version that nobody has tried: this package looks into its NIXL connector."""
    if not version.startswith(TESTED):
        logger.warning(
            "KV checksums were tested with vLLM %sx, and this is %s: run tests/engine of kvchaos-vllm with it first",
            TESTED,
            version,
        )


def usable_policy(vllm_config: Any) -> ChecksumPolicy:
    """The policy that an engine with this VllmConfig can keep.

    Raises:
        StartupError: contradictory settings; speculative decoding; fail-closed with what cannot be verified.
    """
    policy = resolve(ChecksumSettings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config))
    if not policy.enabled:
        return policy
    speculative = vllm_config.speculative_config
    if speculative is not None:
        method = getattr(speculative, "method", None) or "unnamed"
        raise StartupError(
            f"KV checksums with speculative decoding ({method}): this runner cannot checksum after the speculator has "
            "written: turn one of the two off"
        )
    unsupported = _unsupported(vllm_config)
    if unsupported is None:
        return policy
    if policy.fail_closed:
        raise StartupError(
            f"fail-closed KV checksums, but {unsupported}: no load could be verified; turn that off, or use "
            "kv_checksum_mode log or off"
        )
    logger.warning("KV checksums are disabled: %s", unsupported)
    return DISABLED


def _unsupported(vllm_config: Any) -> str | None:
    """What the protocol leaves out."""
    parallel = vllm_config.parallel_config
    dcp = getattr(parallel, "decode_context_parallel_size", 1)
    pcp = getattr(parallel, "prefill_context_parallel_size", 1)
    if dcp > 1 or pcp > 1:
        return f"it has context parallelism (dcp {dcp}, pcp {pcp})"
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        return "its ranks do not report to one scheduler (external_launcher)"
    return None
