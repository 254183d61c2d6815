"""What an engine is built from. Every size that two engines must agree on, or may differ in, is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from engine.checksum.policy import ChecksumSettings
from engine.errors import StartupError
from engine.groups import kv_groups
from engine.numerics import MAX_CONTEXT
from engine.presets import PARALLEL_SIZES, PRESETS, ModelConfig, preset

__all__ = [
    "KERNEL_BLOCK_SPLITS",
    "PARALLEL_SIZES",
    "PRESETS",
    "EngineConfig",
    "KVDtype",
    "Layout",
    "ModelConfig",
    "preset",
]

Layout = Literal["HND", "NHD"]
Speculator = Literal["repeat_last", "ngram"]
KVDtype = Literal["bfloat16", "float16"]
KERNEL_BLOCK_SPLITS = (1, 2)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. Sizes are in tokens or blocks; `num_blocks` counts the null block 0 as well.

    The engine has `tp_size * pp_size` ranks. A block lies in the cache as `kernel_block_splits` kernel blocks, which
    are all that an attention kernel knows of.

    A lease is held for `lease_ticks`; a load waits `load_ticks` for a producer that is to push it. What engines of
    other builds have and this one only declares, for what it means to checksums (CAR-5): context parallelism
    (`dcp_size`, `pcp_size`), an executor that drops the outputs of all pipeline stages but the last
    (`collects_all_stages`), a runner whose speculator writes after everything else (`checksums_after_speculator`).
    """

    engine_id: str
    model: ModelConfig = PRESETS["tiny"]
    seed: int = 0
    block_size: int = 16
    num_blocks: int = 64
    layout: Layout = "HND"
    kv_dtype: KVDtype = "bfloat16"
    max_model_len: int | None = None
    max_batched_tokens: int = 64
    max_num_seqs: int = 8
    steps_in_flight: int = 2
    prefix_caching: bool = True
    lease_ticks: int = 1_000_000
    load_ticks: int = 1_000_000
    device: str = "cpu"
    tp_size: int = 1
    pp_size: int = 1
    kernel_block_splits: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    collects_all_stages: bool = True
    speculator: Speculator | None = None
    draft_tokens: int = 3
    checksums_after_speculator: bool = True
    checksum: ChecksumSettings = field(default_factory=ChecksumSettings)

    def __post_init__(self) -> None:
        minimums = {
            "block_size": 1,
            "num_blocks": 2,
            "max_batched_tokens": 1,
            "max_num_seqs": 1,
            "steps_in_flight": 1,
            "lease_ticks": 1,
            "load_ticks": 1,
            "dcp_size": 1,
            "pcp_size": 1,
            "draft_tokens": 1,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value < minimum:
                raise StartupError(f"engine {self.engine_id}: {name} is {value}: use {minimum} or more")
        if self.layout not in ("HND", "NHD"):
            raise StartupError(f"engine {self.engine_id}: layout is {self.layout!r}: use HND or NHD")
        if self.kv_dtype not in ("bfloat16", "float16"):
            raise StartupError(f"engine {self.engine_id}: kv_dtype is {self.kv_dtype!r}: use bfloat16 or float16")
        unshardable = self.model.why_unshardable(self.tp_size, self.pp_size)
        if unshardable is not None:
            raise StartupError(f"engine {self.engine_id}: {unshardable}")
        if self.kernel_block_splits not in KERNEL_BLOCK_SPLITS or self.block_size % self.kernel_block_splits:
            raise StartupError(
                f"engine {self.engine_id}: kernel_block_splits is {self.kernel_block_splits}: use 1 or 2, and a "
                f"block_size (now {self.block_size}) that it divides"
            )
        if self.speculator not in (None, "repeat_last", "ngram"):
            raise StartupError(f"engine {self.engine_id}: speculator is {self.speculator!r}: use repeat_last or ngram")
        if self.speculator is not None and "state" in self.model.kinds:
            raise StartupError(
                f"engine {self.engine_id}: a speculator with {self.model.name}: a recurrent state cannot take back "
                "what was guessed wrong, leave the speculator out"
            )
        if self.speculator is not None and self.steps_in_flight > 1:
            raise StartupError(
                f"engine {self.engine_id}: steps_in_flight is {self.steps_in_flight}: a speculator decides how many "
                "tokens a step gives, use 1"
            )
        if not 1 <= self.context_limit <= min(self.capacity, MAX_CONTEXT):
            raise StartupError(
                f"engine {self.engine_id}: max_model_len is {self.context_limit}: use 1 to "
                f"{min(self.capacity, MAX_CONTEXT)} ({self.num_blocks - 1} blocks of {self.block_size} hold "
                f"{self.capacity} tokens, the arithmetic {MAX_CONTEXT})"
            )

    def to_plain(self) -> dict[str, Any]:
        """The configuration as JSON values; `from_plain` reads it back."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_plain` gave. Raises StartupError for values that cannot work."""
        parts = {"model": ModelConfig.from_plain(plain["model"]), "checksum": ChecksumSettings(**plain["checksum"])}
        return cls(**{**plain, **parts})

    @property
    def capacity(self) -> int:
        """Tokens that the pool can hold."""
        return tokens_held(self.model, self.num_blocks, self.block_size)

    @property
    def context_limit(self) -> int:
        """Most tokens of one request, prompt and output: `max_model_len`, or what the pool can hold."""
        return min(self.capacity, MAX_CONTEXT) if self.max_model_len is None else self.max_model_len


def tokens_held(model: ModelConfig, num_blocks: int, block_size: int) -> int:
    """Tokens of one request that a pool holds: in a block of each KV cache group; block 0 holds none."""
    states = sum(group.is_state for group in kv_groups(model))
    return (num_blocks - 1 - states) // (len(kv_groups(model)) - states) * block_size
