"""When to sum (EXT-8): what each trigger costs a producer, on prompts of their own and on conversations that grow.

One engine, no transfer: a consumer sums what it loads in any case. Prompts are prefilled one after the other, as a
producer does for a consumer, and what the engine's workers count is read before and after. All triggers must send the
same text, which is checked: a trigger that was cheaper because it summed something else would be no trigger.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.checksum.consumer import CHECKSUMS_PARAM
from engine.checksum.policy import TRIGGERS, ChecksumSettings, Trigger
from engine.clock import VirtualClock
from engine.config import PRESETS, EngineConfig, ModelConfig
from engine.connectors.fabric import Fabric
from engine.core import EngineCore, pull_engine
from engine.request import Request, RequestOutput
from engine.seams import Seams
from harness.errors import RunError

ROUNDS = 7
BLOCK_SIZE = 16
CHUNK = 512
# A forward that costs little beside KV as wide as that of a model that people serve: 16 KiB a token.
WIDE = ModelConfig("wide", 8, 64, 8, 8, 64, 64)
MODELS = {**PRESETS, WIDE.name: WIDE}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts as token ids, in the order in which they are prefilled."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One trigger under one traffic, a request: seconds, tokens read and kept, bytes read; means over the requests.

    A request's seconds are the median of its rounds, so that what else the machine did in one of them is not in it.
    """

    traffic: str
    trigger: Trigger
    requests: int
    seconds: float
    tokens_read: float
    tokens_kept: float
    bytes_read: float


def single_turn(rng: random.Random, count: int, tokens: int) -> Traffic:
    """Prompts that share nothing."""
    prompts = (tuple(rng.randrange(256) for _ in range(tokens)) for _ in range(count))
    return Traffic(f"{count} prompts of {tokens:,} tokens", tuple(prompts))


def multi_turn(rng: random.Random, turns: int, tokens: int) -> Traffic:
    """One agent's conversation: each prompt is the one before and as much again as the first, up to `tokens`."""
    history = tuple(rng.randrange(256) for _ in range(tokens))
    prompts = tuple(history[: tokens * turn // turns] for turn in range(1, turns + 1))
    return Traffic(f"1 conversation of {turns} turns, up to {tokens:,} tokens", prompts)


def measure(
    model: ModelConfig, traffics: Sequence[Traffic], rounds: int, say: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """Every trigger under every traffic, the triggers in turn within a round.

    Raises:
        RunError: two triggers sent other texts.
    """
    # As an engine that shares its machine runs: helpers that are woken for a hundred numbers cost more than they do.
    torch.set_num_threads(1)
    found = []
    for traffic in traffics:
        runs: dict[Trigger, list[_Round]] = {trigger: [] for trigger in TRIGGERS}
        for number in range(rounds):
            say(f"{traffic.name}: round {number + 1} of {rounds}")
            for trigger in TRIGGERS:
                runs[trigger].append(_prefill(model, traffic, trigger))
        texts = {one.texts for own in runs.values() for one in own}
        if len(texts) != 1:
            raise RunError(f"{traffic.name}: the triggers sent other checksums: one of them is wrong")
        found += [_summary(traffic, trigger, own) for trigger, own in runs.items()]
    return found


@dataclass(frozen=True, slots=True)
class _Round:
    seconds: tuple[float, ...]
    tokens_read: int
    tokens_kept: int
    token_bytes: int
    texts: tuple[str, ...]


def _summary(traffic: Traffic, trigger: Trigger, rounds: Sequence[_Round]) -> Measured:
    count, one = len(traffic.prompts), rounds[0]
    return Measured(
        traffic.name,
        trigger,
        count,
        statistics.mean(statistics.median(of_rounds) for of_rounds in zip(*(r.seconds for r in rounds), strict=True)),
        one.tokens_read / count,
        one.tokens_kept / count,
        one.tokens_read * one.token_bytes / count,
    )


def _prefill(model: ModelConfig, traffic: Traffic, trigger: Trigger) -> _Round:
    engine = _engine(model, traffic, trigger)
    times, memory = engine.checksum_times, engine.memory
    texts, seconds = [], [0.0]
    for number, prompt in enumerate(traffic.prompts):
        texts.append(str(_serve(engine, number, prompt)[CHECKSUMS_PARAM]))
        seconds.append(sum(t.start_s + t.wait_s for t in times))
    return _Round(
        tuple(after - before for before, after in itertools.pairwise(seconds)),
        sum(t.tokens_read for t in times),
        sum(t.tokens_kept for t in times),
        memory.bytes_per_token * memory.num_layers * memory.num_kv_heads,
        tuple(texts),
    )


def _serve(engine: EngineCore, number: int, prompt: Sequence[int]) -> Mapping[str, object]:
    """Prefill a prompt for a consumer, which reads it at once. Returns what it is told."""
    name = str(number)
    engine.add_request(Request(name, list(prompt), 1, {"do_remote_decode": True}))
    params = next(output.kv_transfer_params for output in _outputs(engine))
    if engine.connector is None or params is None:
        raise RunError(f"prompt {number}: the engine tells a consumer nothing")
    engine.connector.end_lease(name)
    while engine.scheduler.has_work:
        engine.step()
    return params


def _outputs(engine: EngineCore) -> Iterator[RequestOutput]:
    while True:
        yield from engine.step()


def _engine(model: ModelConfig, traffic: Traffic, trigger: Trigger) -> EngineCore:
    seams = Seams()
    longest = max(map(len, traffic.prompts))
    config = EngineConfig(
        "producer",
        model=model,
        block_size=BLOCK_SIZE,
        num_blocks=2 + -(-(longest + 1) // BLOCK_SIZE),
        max_batched_tokens=CHUNK,
        steps_in_flight=1,
        checksum=ChecksumSettings(kv_checksum_mode="log", kv_checksum_trigger=trigger),
    )
    return pull_engine(config, seams, VirtualClock(), Fabric(seams))
