"""The kit of kvchaos, on the connector of this package."""

from __future__ import annotations

from harness.kit import ConnectorConformance


class TestStaged(ConnectorConformance):
    connector = "staged"
