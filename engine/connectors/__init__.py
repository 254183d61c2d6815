"""Connectors move a request's KV from a producer to a consumer. They know nothing of checksums (CAR-1)."""

DEFAULT_CONNECTOR = "pull"
