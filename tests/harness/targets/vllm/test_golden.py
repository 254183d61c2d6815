"""The token oracle on vLLM: each prompt is asked for once, and how far log probabilities are apart."""

from __future__ import annotations

from typing import Any

import pytest

from engine.proxy import Prompt
from harness.targets.vllm.golden import Golden, GoldenTokens


def test_each_prompt_is_asked_for_once() -> None:
    asked: list[list[int]] = []

    def generate(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked.extend(request["prompt"] for request in requests)
        assert all(request["params"] is None for request in requests)
        return [{"tokens": [sum(request["prompt"])], "logprobs": [-1.0]} for request in requests]

    golden = GoldenTokens()
    same = (Prompt("r1", (1, 2), 4), Prompt("r2", (5,), 4), Prompt("r3", (1, 2), 4))
    found = golden.of(same, generate)
    assert {name: one.tokens for name, one in found.items()} == {"r1": (3,), "r2": (5,), "r3": (3,)}
    golden.of((*same, Prompt("r4", (1, 2), 5)), generate)
    assert asked == [[1, 2], [5], [1, 2]]  # the last one is longer


@pytest.mark.parametrize(
    ("tokens", "logprobs", "wanted"),
    [
        ((1, 2, 3), (-1.0, -2.0, -3.5), 0.5),
        ((1, 2, 4), (-1.0, -2.25, -9.0), 0.25),
        ((9, 2, 3), (-1.0, -2.0, -3.0), None),
        ((), (), None),
    ],
)
def test_log_probabilities_are_compared_as_far_as_the_tokens_agree(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], wanted: float | None
) -> None:
    assert Golden((1, 2, 3), (-1.0, -2.0, -3.0)).distance(tokens, logprobs) == wanted
