"""A registry with two kinds of fault that only these tests know, and a sound scenario to damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from faults import registry
from faults.base import FaultParams, When


class EarlyReuseWhen(When):
    at: Literal["before_read", "after_read"]


class EarlyReuse(FaultParams):
    kind: Literal["early_reuse"]
    when: EarlyReuseWhen
    blocks: Annotated[int, Field(ge=1)] = 1
    share: float = 0.5
    groups: tuple[int, ...] = ()


class SwapTokens(FaultParams):
    kind: Literal["swap_tokens"]
    first: int
    second: int
    target: int | Literal["last"] = "last"

    @model_validator(mode="after")
    def _two(self) -> SwapTokens:
        if self.first == self.second:
            raise ValueError("use two different tokens")
        return self


@pytest.fixture(scope="module", autouse=True)
def kinds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "PARAMS", {"early_reuse": EarlyReuse, "swap_tokens": SwapTokens})
        yield


@pytest.fixture(scope="session")
def sound() -> str:
    return Path(__file__).with_name("stale-read.yaml").read_text(encoding="utf-8")
