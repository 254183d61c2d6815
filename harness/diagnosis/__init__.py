"""What of a load's KV is wrong, and what would explain it."""

from harness.diagnosis.model import Diagnosis, Hypothesis, KVBlocks
from harness.diagnosis.search import diagnose

__all__ = ["Diagnosis", "Hypothesis", "KVBlocks", "diagnose"]
