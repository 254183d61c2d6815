"""vLLM's own carriers between scheduler and workers, with ours in them."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from kvchaos_vllm.orders import Answer, Orders


class ChecksumMetadata(NixlConnectorMetadata):
    """NIXL's metadata of a step with our orders to the workers."""

    kv_checksum_orders: Orders

    @classmethod
    def of(cls, metadata: NixlConnectorMetadata, orders: Orders) -> ChecksumMetadata:
        """The same metadata, with orders."""
        made = cls.__new__(cls)
        made.__dict__.update(metadata.__dict__)
        made.kv_checksum_orders = orders
        return made


class ChecksumWorkerMetadata(KVConnectorWorkerMetadata):
    """What one worker, or after `aggregate` several, summed in a step."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Take over another worker's records."""
        assert isinstance(other, ChecksumWorkerMetadata)
        self.answer.join(other.answer)
        return self
