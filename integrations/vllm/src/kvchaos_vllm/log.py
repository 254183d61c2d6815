"""Loggers below vLLM's own, so that its handlers, format and level (`VLLM_LOGGING_LEVEL`) hold for ours too."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of this package, as `vllm.kvchaos_vllm.MODULE`."""
    return logging.getLogger(f"vllm.{name}")
