"""The token oracle on vLLM: what the same engine gives for a prompt without P/D, before anything can have gone wrong.

Unlike kvchaos' own engine vLLM does not promise that tokens do not depend on batch and chunk size. In float32 they
differ only where two logits are nearly equal; how far apart the log probabilities of both answers are is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.proxy import Prompt

Generate = Callable[[list[dict[str, Any]]], Sequence[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Golden:
    """`logprobs` are those of the tokens, one each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def distance(self, tokens: Sequence[int], logprobs: Sequence[float]) -> float | None:
        """The largest difference of log probabilities, as far as the tokens agree; None: not even the first does."""
        agreeing = 0
        for mine, theirs in zip(self.tokens, tokens, strict=False):
            if mine != theirs:
                break
            agreeing += 1
        pairs = list(zip(self.logprobs, logprobs, strict=False))[:agreeing]
        return max((abs(mine - theirs) for mine, theirs in pairs), default=None)


class GoldenTokens:
    """Keeps every answer: the cells of a workload share their prompts."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], int], Golden] = {}

    def of(self, prompts: Sequence[Prompt], generate: Generate) -> dict[str, Golden]:
        """By request id. `generate` runs plain requests on an engine; it is asked once for each prompt."""
        wanted = {(prompt.token_ids, prompt.max_tokens): prompt for prompt in prompts}
        missing = {key: prompt for key, prompt in wanted.items() if key not in self._known}
        if missing:
            plain = [plain_request(f"golden{n}", prompt) for n, prompt in enumerate(missing.values())]
            for key, answer in zip(missing, generate(plain), strict=True):
                self._known[key] = Golden(tuple(answer["tokens"]), tuple(answer["logprobs"]))
        return {prompt.request_id: self._known[prompt.token_ids, prompt.max_tokens] for prompt in prompts}


def plain_request(name: str, prompt: Prompt) -> dict[str, Any]:
    """A request as the engine's process takes it, without P/D."""
    return {"name": name, "prompt": list(prompt.token_ids), "max_tokens": prompt.max_tokens, "params": None}
