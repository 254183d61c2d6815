"""kv_transfer_params as faults see them: what P sends to D through the proxy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from faults.base import digest

BLOCK_IDS_PARAM = "remote_block_ids"


def params_digest(params: Mapping[str, Any]) -> str:
    """A digest of the parameters as JSON, keys sorted."""
    return digest(json.dumps(dict(params), sort_keys=True).encode())
