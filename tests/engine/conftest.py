"""Engines for the tests of this package, alone or as a pair that one seeded generator drives."""

from __future__ import annotations

import random
from collections import deque
from functools import lru_cache

import pytest
import torch

from engine.checksum.policy import ChecksumSettings
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.fabric import Fabric
from engine.connectors.registry import CONNECTORS
from engine.core import EngineCore, connected_engine
from engine.proxy import Prompt, Proxy
from engine.request import Request
from engine.seams import Seams

MAX_ACTIONS = 200_000

# A prompt whose eighth greedy token is EOS.
EOS_AFTER_8 = (243, 132, 195, 169, 115, 97, 109, 34, 60, 177, 91, 53, 44, 35)


def make_prompt(name, length, max_tokens=4, seed=0, prefix=()):
    """A prompt of `length` random byte tokens after a prefix."""
    rng = random.Random(f"{name} {length} {seed}")
    return Prompt(name, (*prefix, *(rng.randrange(256) for _ in range(length - len(prefix)))), max_tokens)


def tokens_alone(token_ids, max_tokens, **options):
    """The greedy tokens of one prompt on an engine that serves nothing else and holds no cache."""
    return _tokens_alone(tuple(token_ids), max_tokens, tuple(sorted(options.items())))


@lru_cache(maxsize=1024)
def _tokens_alone(token_ids, max_tokens, config):
    options = {"num_blocks": 128, "prefix_caching": False, "steps_in_flight": 1} | dict(config)
    engine = EngineCore(EngineConfig("alone", **options))
    engine.add_request(Request("r", list(token_ids), max_tokens))
    for _ in range(MAX_ACTIONS):
        for output in engine.step():
            return output.token_ids
    raise AssertionError("the engine alone made no progress")


def serve(prompts, seams=None, **options):
    """Serve prompts on one engine without P/D. Returns tokens and stored prompt KV (uint8 array) by request id."""
    seams = seams or Seams()
    kv = {}

    def keep(event):
        kv[event.request_id] = event.memory.tokens(event.groups[0])

    seams.on("producer.kv_final", keep)
    engine = EngineCore(EngineConfig("one", **{"num_blocks": 512} | options), seams)
    for prompt in prompts:
        params = {"do_remote_decode": True}
        engine.add_request(Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens, params))
    tokens = {}
    for _ in range(MAX_ACTIONS):
        if not engine.scheduler.num_unfinished:
            return tokens, kv
        for can, act in (
            (engine.can_schedule, engine.schedule),
            (engine.can_schedule, engine.schedule),
            (engine.can_execute, engine.execute),
            (engine.can_collect, engine.collect),
        ):
            if can():
                act()
        tokens |= {output.request_id: output.token_ids for output in engine.take_finished()}
    raise AssertionError("no progress")


class World:
    """A producer, a consumer, a proxy and a fabric. Each action is drawn from those that are possible."""

    def __init__(
        self, mode="enforce", load_failure="fail", seed=0, seams=None, producer=(), consumer=(), transfer="pull", **both
    ):
        settings = ChecksumSettings(kv_checksum_mode=mode, kv_load_failure_policy=load_failure)
        common = {"checksum": settings} | both
        self.rng = random.Random(seed)
        self.seams = seams or Seams()
        self.clock = VirtualClock()
        self.fabric = Fabric(self.seams)
        self.p, self.d = (
            connected_engine(
                CONNECTORS[transfer], EngineConfig(name, **common | dict(own)), self.seams, self.clock, self.fabric
            )
            for name, own in (("P", producer), ("D", consumer))
        )
        self.proxy = Proxy(self.p, self.d, self.seams, push=transfer == "push")
        self.arrivals = deque()
        self.prefilled = {}
        self.answers = {}

    @property
    def engines(self):
        return self.p, self.d

    def actions(self, engines=None):
        """What can happen next, in a fixed order."""
        found = [lambda: self.submit(self.arrivals.popleft())] if self.arrivals else []
        for engine in engines or self.engines:
            if engine.can_schedule():
                found.append(engine.schedule)
            if engine.can_execute():
                found.append(engine.execute)
            if engine.can_collect():
                found.append(engine.collect)
        found += [lambda name=name: self.forward(name) for name in self.proxy.ready()]
        return found + self.fabric.ready()

    def submit(self, prompt):
        self.proxy.submit(prompt)

    def forward(self, request_id):
        answer = self.proxy.forward(request_id)
        if answer is not None:
            self.answers[answer.request_id] = answer

    def act(self):
        """Let one thing happen, and take what finished by it."""
        self.rng.choice(self.actions())()
        self.clock.advance()
        for output in self.p.take_finished():
            self.prefilled[output.request_id] = output
            answer = self.proxy.prefilled(output)
            if answer is not None:
                self.answers[answer.request_id] = answer
        for output in self.d.take_finished():
            assert output.request_id not in self.answers, "answered twice"
            self.answers[output.request_id] = output

    def act_until(self, condition):
        for _ in range(MAX_ACTIONS):
            if condition():
                return
            self.act()
        raise AssertionError("no progress")

    def run(self, prompts):
        """Serve these prompts, then let everything settle. Returns the answers by request id."""
        self.arrivals.extend(prompts)
        self.act_until(lambda: all(prompt.request_id in self.answers for prompt in prompts))
        self.settle()
        return self.answers

    def settle(self):
        """Run until nothing is left to do: no request, load, copy, notice, lease or step."""
        self.act_until(lambda: not any(e.scheduler.has_work or e.steps_in_flight for e in self.engines))
        assert self.fabric.num_pending == 0

    def run_producer(self, prompt):
        """Let P prefill one prompt, without the proxy. Returns P's parameters for the consumer."""
        self.p.add_request(Request(prompt.request_id, list(prompt.token_ids), 1, {"do_remote_decode": True}))
        while True:
            for output in self.p.step():
                return dict(output.kv_transfer_params)

    def load(self, prompt, params=None, **changed):
        """Start the load of a prompt on D: its first step is planned and executed."""
        params = self.run_producer(prompt) if params is None else params
        request = Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens, params | changed)
        self.d.add_request(request)
        one_step(self.d)
        return request

    def deliver(self):
        """Let the fabric finish everything that is on the wire."""
        while self.fabric.ready():
            self.fabric.ready()[0]()

    def finish(self, engine=None):
        """Step one engine (D) alone until it has no unfinished request. Returns its outputs by id."""
        engine = engine or self.d
        outputs = {output.request_id: output for output in engine.take_finished()}
        for _ in range(MAX_ACTIONS):
            if not engine.scheduler.num_unfinished and not engine.steps_in_flight:
                return outputs
            outputs |= {output.request_id: output for output in engine.step()}
        raise AssertionError("no progress")


def one_step(engine):
    """Plan, execute and collect exactly one step."""
    assert engine.schedule(), "there was nothing to schedule"
    engine.execute()
    engine.collect()


def blocks_in_use(engine):
    return engine.config.num_blocks - 1 - engine.scheduler.kv.pool.num_free


def mentions(root, wanted):
    """Where the request ids of `wanted` occur in the state that is reachable from an object."""
    found, seen, todo = [], set(), [(root, type(root).__name__)]
    while todo:
        value, path = todo.pop()
        if isinstance(value, str):
            found += [path] if value in wanted else []
            continue
        if id(value) in seen or isinstance(value, (torch.Tensor, int, float, bytes, type)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += [(key, f"{path} key") for key in value]
            todo += [(item, f"{path}[...]") for item in value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            todo += [(item, f"{path}[...]") for item in value]
        else:
            names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += [(getattr(value, name), f"{path}.{name}") for name in names if hasattr(value, name)]
            todo += [(item, f"{path}.{name}") for name, item in getattr(value, "__dict__", {}).items()]
    return sorted(set(found))


@pytest.fixture(scope="session")
def new_world():
    """Make a world: `new_world(mode=..., seed=..., producer={...}, consumer={...}, **both)`."""
    return World


@pytest.fixture(scope="session")
def tools():
    """The functions of this file, by name."""
    return Tools


class Tools:
    eos_after_8 = EOS_AFTER_8
    prompt = staticmethod(make_prompt)
    tokens_alone = staticmethod(tokens_alone)
    serve = staticmethod(serve)
    one_step = staticmethod(one_step)
    blocks_in_use = staticmethod(blocks_in_use)
    mentions = staticmethod(mentions)
