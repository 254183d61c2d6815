"""What a diagnosis takes and gives: KV as bytes on one side, sentences on the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NONE_FITS = "None of the known kinds of damage fits."


@dataclass(frozen=True, slots=True, eq=False)
class KVBlocks:
    """KV of consecutive tokens of one request.

    Attributes:
        kv: uint8 [layers, heads, tokens, bytes_per_token]; a token's bytes of one layer and head are its K bytes and
            then as many V bytes.
        block_size: tokens a block.
        first_token: position in the request of the first of these tokens.
        layer_numbers: what the layers are called, one a layer; None: from 0.
        first_head: what the first head is called.
        element_bytes: of a number; what is said of bits and of values is known for 2 (bf16, fp16) only.

    Raises:
        ValueError: kv is not such an array, or a number is out of range.
    """

    kv: npt.NDArray[np.uint8]
    block_size: int
    first_token: int = 0
    layer_numbers: tuple[int, ...] | None = None
    first_head: int = 0
    element_bytes: int = 2

    def __post_init__(self) -> None:
        kv = self.kv
        if kv.dtype != np.uint8 or kv.ndim != 4 or 0 in kv.shape or kv.shape[3] % 2:
            raise ValueError(
                f"kv is {kv.dtype} {list(kv.shape)}: it must be uint8 [layers, heads, tokens, bytes_per_token], "
                "none 0, as many K bytes a token as V bytes"
            )
        if self.block_size < 1 or self.first_token < 0:
            raise ValueError(
                f"block_size is {self.block_size} and first_token {self.first_token}: at least 1, and not negative"
            )
        if self.layer_numbers is not None and len(self.layer_numbers) != kv.shape[0]:
            raise ValueError(f"layer_numbers are {len(self.layer_numbers)} for {kv.shape[0]} layers of kv")

    @property
    def layer_names(self) -> tuple[int, ...]:
        return tuple(range(self.kv.shape[0])) if self.layer_numbers is None else self.layer_numbers

    @property
    def end(self) -> int:
        """Position in the request after the last token."""
        return self.first_token + int(self.kv.shape[2])


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What would explain the damage.

    Attributes:
        kind: a short name, for programs; `blocks_exchanged`, for example.
        text: one sentence. It says so itself where it explains only a part.
        explained: the part of the differing bytes that it predicts, in value and place, 0 to 1. It is 0 where the
            hypothesis says only where the damage is, and below 1 where some bytes are in no dump.
    """

    kind: str
    text: str
    explained: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`damage` says which layers, heads and tokens differ; None: nothing does. `hypotheses`: best first."""

    damage: str | None
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """What to print under the damage, a sentence each."""
        if self.damage is not None and not self.hypotheses:
            return (NONE_FITS,)
        return tuple(hypothesis.text for hypothesis in self.hypotheses)
