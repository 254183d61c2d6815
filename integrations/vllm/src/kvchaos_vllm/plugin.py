"""vLLM's hook for plugins: makes the connector known by its name, so that MultiConnector finds it.

`kv_connector_module_path` does that for the one connector that a KVTransferConfig names, not for the parts of a
MultiConnector.
"""

from __future__ import annotations

CONNECTOR = "ChecksumNixlConnector"


def register() -> None:
    """Register the connector with vLLM's factory; called in each of vLLM's processes, maybe more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvchaos_vllm.connector", CONNECTOR)
