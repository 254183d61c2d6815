"""A small speculator: guesses the next tokens of a request, so that several may come of one step.

The guesses are computed and checked in the step that makes them, after its forward: their KV is written past the
request's last token, into the last block and the ones behind it, before anything is checksummed (PRO-2). What was
guessed right stays; what was not lies in slots that never count (DEF-8) until the next step writes them again. The
tokens are those of the model alone, whatever is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import Speculator

_NGRAM = 2


def propose(speculator: Speculator, tokens: Sequence[int], count: int) -> list[int]:
    """`count` guesses of what follows these tokens, of which there is at least one.

    `repeat_last`: the last token again and again. `ngram`: what followed where the last two tokens were seen last;
    where that ends, or if they were never seen, as `repeat_last`.
    """
    guesses: list[int] = []
    if speculator == "ngram":
        guesses = _continuation(tokens, count)
    return guesses + [(guesses or tokens)[-1]] * (count - len(guesses))


def _continuation(tokens: Sequence[int], count: int) -> list[int]:
    tail = list(tokens[-_NGRAM:])
    for start in range(len(tokens) - _NGRAM - 1, -1, -1):
        if list(tokens[start : start + _NGRAM]) == tail:
            return list(tokens[start + _NGRAM : start + _NGRAM + count])
    return []


def accept(guesses: Sequence[int], greedy: Sequence[int]) -> tuple[int, ...]:
    """The tokens that the model itself gives, as far as the guesses were right.

    Args:
        guesses: what was computed after the sampled token, one less than `greedy`.
        greedy: what the model gives after the sampled token and after each guess.
    """
    right = 0
    while right < len(guesses) and guesses[right] == greedy[right]:
        right += 1
    return tuple(greedy[: right + 1])
