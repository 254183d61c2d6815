"""Parameters that no producer sends: each must be refused, or fail its load, or do no harm. Never anything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.connectors.registry import ConnectorFactory
from engine.errors import RequestError
from engine.request import FinishReason
from harness.conformance.pair import NUM_BLOCKS, Pair, make_prompt, tokens_alone

_NUMBERS: tuple[Any, ...] = (-1, NUM_BLOCKS, 2**31, 2**70, 1.5, "7", None, [])
_TEXTS: tuple[Any, ...] = ("nobody", "", "x" * 100_000, 7, None, [])
_FLAGS: tuple[Any, ...] = (1, "true", None, [])
_LISTS: tuple[Any, ...] = (None, [], "text", 5, {}, [None], [[]])


def hostile_params(params: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was changed, in words, and the parameters with that one change."""
    for name in params:
        yield f"{name} is missing", {key: value for key, value in params.items() if key != name}
    for where, changed in _variants(dict(params)):
        yield where.removeprefix("."), changed


def _variants(value: Any) -> Iterator[tuple[str, Any]]:
    """Each way to change one thing in a value made of dicts, lists, texts, numbers and flags."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ((f".{name}{where}", {**value, name: changed}) for where, changed in _variants(inner))
        return
    if isinstance(value, list):
        for index in sorted({0, len(value) - 1}) if value else ():
            for where, changed in _variants(value[index]):
                yield f"[{index}]{where}", [*value[:index], changed, *value[index + 1 :]]
        if value:
            yield " lacks its last item", value[:-1]
    replacements = _FLAGS if isinstance(value, bool) else _NUMBERS if isinstance(value, int | float) else _TEXTS
    for other in _LISTS if isinstance(value, list) else replacements:
        yield f" is {_shown(other)}", other


def hostile_trouble(factory: ConnectorFactory) -> str | None:
    """A line for each change of P's parameters that D takes badly. None: it takes all well."""
    pair, prompt = Pair(factory), make_prompt(57)
    params = pair.prefill("r", prompt)
    if params is None:
        return "P names no parameters for the consumer of a prompt that it was sent with do_remote_decode."
    wanted = tokens_alone(prompt)
    told = []
    for number, (what, changed) in enumerate(hostile_params(params)):
        trouble = _one(pair, f"h{number}", prompt, changed, wanted)
        if trouble is not None:
            told.append(f"kv_transfer_params.{what}: {trouble}")
            pair = Pair(factory)  # whatever state it is in now
            params = pair.prefill("r", prompt) or {}
    return "\n".join(told) or None


def _one(
    pair: Pair, request_id: str, prompt: tuple[int, ...], params: Mapping[str, Any], wanted: tuple[int, ...]
) -> str | None:
    try:
        answer = pair.load(request_id, prompt, params)
    except RequestError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever it raises ends the engine
        return f"the engine stopped with {type(error).__name__}: {error}"
    if answer is None:
        return "D never answered: a load that cannot work must be reported as failed"
    if pair.held(pair.consumer):
        return f"{pair.held(pair.consumer)} of D's blocks never came back"
    if answer.finish_reason is FinishReason.ERROR:
        return None
    damage = pair.seen.damage(request_id, "r")
    if damage:
        return "\n".join(["the load was reported as finished", *damage])
    return None if answer.token_ids == wanted else "D answered with other tokens than one engine does"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}... ({len(text)} characters)"
