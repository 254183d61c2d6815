"""A producer and a consumer whose workers read through a NIXL that is played."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path

import pytest

from engine.checksum.policy import ChecksumSettings
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.nixl import NixlPatience, NixlWorker
from engine.connectors.nixl_memory import PeerError
from engine.connectors.nixl_peers import NixlAgent
from engine.connectors.pull import PullScheduler
from engine.core import EngineCore
from engine.request import Request
from engine.seams import Seams

MAX_STEPS = 20_000


def _load_fake():
    name = "nixl_fake"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("nixl_fake.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


fake = _load_fake()


class NixlPair:
    """Engines "P" and "D", which asks P in a thread how it is read. Steps are driven by hand."""

    def __init__(self, tools, heartbeat_s=0, producer=(), consumer=(), mode="enforce", load_failure="fail", **both):
        settings = ChecksumSettings(kv_checksum_mode=mode, kv_load_failure_policy=load_failure)
        common = {"checksum": settings, "prefix_caching": False} | both
        self._tools = tools
        self.net = fake.Net()
        self.seams = Seams()
        self.clock = VirtualClock()
        self.asked = []
        self.answers = {}
        self.seconds = 0.0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._patience = NixlPatience(heartbeat_s=heartbeat_s, now=lambda: self.seconds)
        self._options = common
        self.p, self.p_worker, self.p_agent = self.engine("P", common | dict(producer))
        self.d, self.d_worker, self.d_agent = self.engine("D", common | dict(consumer))
        self.answers["P"] = self.p_worker.describe()

    def engine(self, name, options):
        config = EngineConfig(name, **options)
        agent = NixlAgent(name)
        leases = PullScheduler(name, config.lease_ticks, self.clock)
        workers = []

        def connect(memory):
            workers.append(NixlWorker(name, memory, self.seams, self._fetch, agent, self._patience, leases.renew))
            return workers[0]

        return EngineCore(config, self.seams, leases, connect), workers[0], agent

    def _fetch(self, engine_id):
        self.asked.append(engine_id)
        assert self.may_answer.wait(60)
        answer = self.answers.get(engine_id)
        if answer is None:
            raise PeerError(f"engine {engine_id} is no peer")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restart_producer(self):
        """Another process behind the same id: the old agent answers no more."""
        self.net.dead.add(self.p_agent.name)
        self.p, self.p_worker, self.p_agent = self.engine("P", self._options)
        self.answers["P"] = self.p_worker.describe()

    def prefilled(self, name="r", length=40, max_tokens=4, **changed):
        """A request for D whose prompt P has prefilled, and its right tokens."""
        prompt = self._tools.prompt(name, length, max_tokens)
        self.p.add_request(Request(name, list(prompt.token_ids), 1, {"do_remote_decode": True}))
        for _ in range(MAX_STEPS):
            for output in self.p.step():
                params = dict(output.kv_transfer_params) | changed
                request = Request(name, list(prompt.token_ids), max_tokens, params)
                model = {"model": self.p.config.model}
                return request, self._tools.tokens_alone(prompt.token_ids, max_tokens, **model)
        raise AssertionError("P makes no progress")

    def step_until(self, condition, engine=None):
        for _ in range(MAX_STEPS):
            if condition():
                return
            (engine or self.d).step()
            threading.Event().wait(0.0005)
        raise AssertionError("no progress")

    def serve(self, *requests):
        """Run D until these have ended. Their outputs by id."""
        for request in requests:
            self.d.add_request(request)
        return self.finish(*requests)

    def finish(self, *requests):
        outputs = {}
        for _ in range(MAX_STEPS):
            if all(request.request_id in outputs for request in requests):
                return outputs
            outputs |= {output.request_id: output for output in self.d.step()}
            threading.Event().wait(0.0005)
        raise AssertionError(f"D makes no progress: {sorted(outputs)} of {len(requests)}")

    def post_reads(self, request):
        """Until the reads of this request's load are on the wire."""
        self.net.at_once = False
        before = len(self.net.handles)
        self.d.add_request(request)
        self.step_until(lambda: len(self.net.handles) > before)

    @property
    def free(self):
        """Whether every block of D is free, once its steps have been collected."""
        self.step_until(lambda: not self.d.scheduler.has_work and not self.d.steps_in_flight)
        return self._tools.blocks_in_use(self.d) == 0


@pytest.fixture
def nixl_pair(tools, monkeypatch):
    """Make a pair: `nixl_pair(producer={...}, consumer={...}, heartbeat_s=..., **both)`."""

    def new_agent(name):
        return fake.FakeAgent(made[-1].net, name)

    made = []
    monkeypatch.setattr("engine.connectors.nixl_peers._new_agent", new_agent)

    class Made(NixlPair):
        def __init__(self, *arguments, **options):
            made.append(self)
            super().__init__(*arguments, **options)

    return lambda **options: Made(tools, **options)


@pytest.fixture(scope="session")
def nixl_error():
    """What the played NIXL raises."""
    return fake.NixlError
