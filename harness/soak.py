"""The soak: many requests over a local pair, some of them faulted. Does anything wrong get out, leak, or grow?

Faults are single bits flipped in D's memory before its check, which no known gap excuses: each must be a mismatch,
recomputed, and answered with the right tokens. Everything else must verify.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from engine.config import EngineConfig, preset
from engine.proxy import Prompt
from engine.seams import LoadFinished, Seams
from engine.server.incoming import REQUEST_ID_HEADER
from engine.tokenizer import BOS
from faults.base import digest
from harness.guard import GuardedSeams
from harness.oracles.tokens import oracle_tokens
from harness.seeds import derive
from harness.targets.pairs.local import LocalPair
from harness.targets.pairs.pair import Pair
from harness.targets.workload import CONSUMER, LEASE_TICKS, PRODUCER, PROXY
from scenarios.words import Policy

RSS_LIMIT_KIB = 32 * 1024
_DISTINCT = 100  # prompts; without prefix caches each request loads its own all the same
_QUIET_S = 20.0
_POLL_S = 0.02
_KIB = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """`fault_rate` in percent. RSS is compared with that after `warm` requests. `deadline_s` is of the requests."""

    requests: int = 1000
    concurrency: int = 16
    fault_rate: int = 5
    warm: int = 300
    seed: int = 0
    deadline_s: float = 600.0

    def faulted(self) -> frozenset[str]:
        """Ids of the requests that are faulted: the share that `fault_rate` says, rounded."""
        count = round(self.requests * self.fault_rate / 100)
        chosen = random.Random(derive("soak", self.seed)).sample(range(self.requests), count)
        return frozenset(f"s{n}" for n in chosen)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a request. `tokens` is None without an answer of the model."""

    request_id: str
    verdict: str
    recomputed: bool
    tokens: tuple[int, ...] | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SoakResult:
    """`outcomes` counts what became of requests; `rss_kib` has for each process RSS when warm, and in the end."""

    requests: int
    faulted: int
    flipped: int
    seconds: float
    outcomes: Mapping[str, int]
    rss_kib: Mapping[str, tuple[int, int]]
    problems: tuple[str, ...]


class Flipper:
    """Flips one bit of D's copy of each load that is to be faulted, before it is checked."""

    def __init__(self, faulted: frozenset[str], seed: int) -> None:
        self._faulted = faulted
        self._seed = seed
        self.flipped: set[str] = set()

    def attach(self, seams: Seams) -> None:
        seams.on("consumer.load_finished", self._flip)

    def _flip(self, event: LoadFinished) -> None:
        if event.request_id not in self._faulted or event.request_id in self.flipped:
            return
        rng = random.Random(derive("flip", self._seed, event.request_id))
        blocks = rng.choice([blocks for blocks in event.groups.values() if blocks.block_ids])
        token = rng.randrange(blocks.start * blocks.block_size, blocks.num_tokens)
        block_id = blocks.block_ids[token // blocks.block_size - blocks.start]
        layer, head = rng.randrange(event.memory.num_layers), rng.randrange(event.memory.num_kv_heads)
        slot = token % blocks.block_size
        data = event.memory.slots((block_id,))[layer, head, slot].copy()
        before = digest(data)
        data[rng.randrange(data.size)] ^= 1 << rng.randrange(8)
        event.memory.write_slot(layer, head, block_id, slot, data)
        if digest(event.memory.slots((block_id,))[layer, head, slot]) != before:
            self.flipped.add(event.request_id)


def soak(plan: SoakPlan) -> SoakResult:
    """Start a pair, make the requests, and say what was wrong.

    Raises:
        PairError: the servers do not come up.
        RemoteCommandError: one has gone.
    """
    prompts = make_prompts(plan)
    wanted = oracle_tokens("tiny", "bfloat16", plan.seed, prompts)
    faulted = plan.faulted()
    flipper = Flipper(faulted, plan.seed)
    seams = GuardedSeams()
    flipper.attach(seams)
    pair = LocalPair()
    try:
        pair.configure(_config(PRODUCER, plan.seed), _config(CONSUMER, plan.seed))
        pair.dispatcher.begin(seams)
        started = time.monotonic()
        answers, warm = _make_requests(pair, plan, prompts)
        seconds = time.monotonic() - started
        problems = list(_leaks(pair))
        last = rss_kib(pair)
        if pair.dispatcher.error is not None:
            problems.append(f"a fault crashed: {pair.dispatcher.error}")
    finally:
        pair.stop()
    found = [outcome(answer, answer.request_id in faulted, wanted[_prompt_id(answer)]) for answer in answers]
    problems += [
        f"{a.request_id}: {o}: {a.error or a.verdict}" for a, (o, good) in zip(answers, found, strict=True) if not good
    ]
    problems += [f"{name} was to be faulted, and was not" for name in sorted(faulted - flipper.flipped)]
    rss = {name: (kib, last[name]) for name, kib in warm.items()}
    problems += growth(rss)
    return SoakResult(
        requests=len(answers),
        faulted=len(faulted),
        flipped=len(flipper.flipped),
        seconds=seconds,
        outcomes=dict(sorted(Counter(name for name, _ in found).items())),
        rss_kib=rss,
        problems=tuple(problems),
    )


def outcome(answer: Answer, faulted: bool, wanted: Sequence[int]) -> tuple[str, bool]:
    """What became of a request, in a word or two, and whether that is as it must be."""
    if answer.tokens is None:
        return "failed", False
    how = "recomputed" if answer.recomputed else "served"
    if answer.tokens != tuple(wanted):
        return f"{answer.verdict}, {how}, wrong tokens", False
    return f"{answer.verdict}, {how}", (answer.verdict, how) == (
        ("mismatch", "recomputed") if faulted else ("verified", "served")
    )


def growth(rss: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """The processes that have grown more than they may."""
    for name, (warm, last) in rss.items():
        if last - warm > RSS_LIMIT_KIB:
            yield f"the {name} grew by {last - warm} KiB after it was warm, more than {RSS_LIMIT_KIB}"


def make_prompts(plan: SoakPlan) -> tuple[Prompt, ...]:
    """Different prompts of 24 to 96 random tokens, which the requests take in turn."""
    rng = random.Random(derive("prompts", plan.seed))
    return tuple(
        Prompt(f"s{n}", tuple(rng.randrange(BOS) for _ in range(rng.randint(24, 96))), 6)
        for n in range(min(_DISTINCT, plan.requests))
    )


def rss_kib(pair: LocalPair) -> dict[str, int]:
    """Resident memory of each process of a pair, as the kernel has it."""
    found = {}
    for name, pid in pair.pids.items():
        match = _KIB.search(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
        found[name] = int(match[1]) if match else 0
    return found


def _prompt_id(answer: Answer) -> str:
    return f"s{int(answer.request_id[1:]) % _DISTINCT}"


def _config(engine_id: str, seed: int) -> EngineConfig:
    return EngineConfig(
        engine_id=engine_id,
        model=preset("tiny"),
        seed=seed,
        num_blocks=256,
        max_num_seqs=16,
        prefix_caching=False,
        lease_ticks=LEASE_TICKS,
        checksum=Policy.FAIL_CLOSED_RECOMPUTE.settings(),
    )


def _make_requests(pair: LocalPair, plan: SoakPlan, prompts: Sequence[Prompt]) -> tuple[list[Answer], dict[str, int]]:
    """All answers, and the processes' memory after the first `warm` of them."""
    deadline = time.monotonic() + plan.deadline_s
    late = threading.Event()
    warm: dict[str, int] = {}
    answers: list[Answer] = []
    limits = httpx.Limits(max_connections=plan.concurrency, max_keepalive_connections=plan.concurrency)
    with (
        httpx.Client(timeout=60.0, trust_env=False, limits=limits) as client,
        ThreadPoolExecutor(plan.concurrency) as pool,
    ):

        def request(number: int) -> Answer:
            prompt = replace(prompts[number % len(prompts)], request_id=f"s{number}")
            if late.is_set() or time.monotonic() > deadline:
                late.set()
                return Answer(prompt.request_id, "none", False, None, f"not begun within {plan.deadline_s:g} s")
            return _ask(client, pair.url(PROXY), prompt)

        for future in as_completed([pool.submit(request, number) for number in range(plan.requests)]):
            answers.append(future.result())
            if len(answers) == min(plan.warm, plan.requests):
                warm = rss_kib(pair)
    return answers, warm


def _ask(client: httpx.Client, url: str, prompt: Prompt) -> Answer:
    body = {"prompt": list(prompt.token_ids), "max_tokens": prompt.max_tokens}
    try:
        response = client.post(f"{url}/v1/completions", json=body, headers={REQUEST_ID_HEADER: prompt.request_id})
        plain = response.json()
    except (httpx.HTTPError, ValueError) as error:
        return Answer(prompt.request_id, "none", False, None, f"{type(error).__name__}: {error}")
    load = plain.get("kv_load") or {"verdict": "no_load", "recomputed": False}
    tokens = tuple(plain["choices"][0]["token_ids"]) if response.status_code == 200 else None
    error_text = None if tokens is not None else str(plain.get("error", {}).get("message"))
    return Answer(prompt.request_id, load["verdict"], bool(load["recomputed"]), tokens, error_text)


def _leaks(pair: Pair) -> Iterator[str]:
    """What is left in the engines when all requests have been answered. Leases need a moment to hear that they end."""
    deadline = time.monotonic() + _QUIET_S
    for name in (PRODUCER, CONSUMER):
        state = pair.state(name)
        while state["free"] != state["total"] and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            state = pair.state(name)
        if state["free"] != state["total"]:
            yield f"{state['total'] - state['free']} of {state['total']} blocks of the {name} never came back"
