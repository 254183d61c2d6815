"""An engine as whoever drives it sees it: the three halves of a step, and what it refuses at start."""

import logging

import pytest

from engine.checksum.policy import ChecksumSettings
from engine.checksum.verdict import VerdictStatus
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.base import SchedulerConnector
from engine.connectors.fabric import Fabric
from engine.connectors.pull import PullScheduler, PullWorker
from engine.core import EngineCore, pull_engine, usable_policy
from engine.errors import StartupError
from engine.request import FinishReason, Request
from engine.seams import Hold, Seams


class WithoutCarrier(SchedulerConnector):
    """Moves KV and says nothing of checksums, as an offloading connector: it does not override the method."""

    def __init__(self, pull):
        self.pull = pull

    def check_params(self, request):
        self.pull.check_params(request)

    def matched_tokens(self, request, num_local_tokens):
        return self.pull.matched_tokens(request, num_local_tokens)

    def plan_load(self, request, groups):
        return self.pull.plan_load(request, groups)

    def request_finished(self, request, block_ids):
        return self.pull.request_finished(request, block_ids)

    def sent(self, request_id):
        return self.pull.sent(request_id)

    def expired(self):
        return self.pull.expired()

    @property
    def num_leases(self):
        return self.pull.num_leases


class CarriesNothingNow(PullScheduler):
    """Could carry checksums, but not those of any request here."""

    def kv_checksum_carrier(self, request, receiving):
        return None


def config(mode, **options):
    return EngineConfig("D", checksum=ChecksumSettings(kv_checksum_mode=mode), **options)


def pull():
    return PullScheduler("D", 10, VirtualClock())


# ---- start-up


@pytest.mark.req("CAR-3")
def test_fail_closed_refuses_a_connector_without_a_carrier():
    with pytest.raises(StartupError, match="WithoutCarrier carries no checksums: no load could ever be verified"):
        EngineCore(config("enforce"), connector=WithoutCarrier(pull()))


@pytest.mark.req("CAR-3")
def test_fail_closed_refuses_to_do_without_a_connector():
    with pytest.raises(StartupError, match="has no connector"):
        EngineCore(config("enforce"))


@pytest.mark.req("CAR-3")
def test_fail_open_disables_checksums_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        policy = usable_policy(config("log"), WithoutCarrier(pull()))
    assert (policy.enabled, policy.fail_closed, policy.load_failure) == (False, False, "fail")
    assert caplog.messages == ["engine D: KV checksums are disabled, WithoutCarrier carries no checksums"]


@pytest.mark.req("CAR-3")
@pytest.mark.parametrize("mode", ["off", "log", "enforce"])
def test_a_connector_with_a_carrier_keeps_the_policy(mode, caplog):
    policy = usable_policy(config(mode), pull())
    assert (policy.enabled, policy.fail_closed) == (mode != "off", mode == "enforce")
    assert caplog.messages == []


def test_without_checksums_nothing_is_asked_of_a_connector(caplog):
    assert not usable_policy(config("off"), None).enabled
    assert caplog.messages == []


@pytest.mark.req("POL-1")
def test_contradictory_flags_are_refused_at_start():
    settings = ChecksumSettings(kv_checksum_fail_closed=True)
    with pytest.raises(StartupError, match="without enable_kv_checksum"):
        EngineCore(EngineConfig("D", checksum=settings))


def load_on(world, connector, tools, mode):
    """Serve one load of P's on an engine with this connector."""
    engine = EngineCore(
        EngineConfig("D2", checksum=ChecksumSettings(kv_checksum_mode=mode)),
        world.seams,
        connector,
        lambda memory: PullWorker("D2", memory, world.fabric),
    )
    prompt = tools.prompt("a", 40)
    engine.add_request(Request("a", list(prompt.token_ids), prompt.max_tokens, world.run_producer(prompt)))
    tools.one_step(engine)
    world.deliver()
    output = world.finish(engine)["a"]
    assert output.token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)
    return engine, output.verdict


@pytest.mark.req("CAR-1", "CAR-3", "VER-7")
def test_loads_through_a_connector_without_a_carrier_are_served_unchecked(tools, new_world):
    _, verdict = load_on(new_world(), WithoutCarrier(pull()), tools, "log")
    assert (verdict.status, verdict.reason) == (VerdictStatus.NOT_CHECKED, "off")


@pytest.mark.req("CAR-1", "VER-7")
def test_a_request_that_nothing_carries_is_served_unchecked_under_fail_closed(tools, new_world, monkeypatch):
    world = new_world()
    summed = []
    world.seams.on("worker.record_leaves", lambda event: summed.append(event.engine))
    engine, verdict = load_on(world, CarriesNothingNow("D2", 10, world.clock), tools, "enforce")
    assert (verdict.status, verdict.reason) == (VerdictStatus.NOT_CHECKED, "no_carrier")
    assert summed == ["P"], "D does not even sum it"
    assert not engine.scheduler.checks.counts


@pytest.mark.req("CAR-1")
def test_a_producer_s_request_that_nothing_carries_is_not_summed(tools):
    engine = EngineCore(config("enforce"), connector=CarriesNothingNow("D", 10, VirtualClock()))
    engine.add_request(Request("a", list(tools.prompt("a", 40).token_ids), 1, {"do_remote_decode": True}))
    plan = engine.scheduler.schedule()
    assert (set(plan.kv_final), plan.checksum_sends) == ({"a"}, {})


# ---- driving


def test_the_halves_of_a_step_come_apart(tools):
    engine = EngineCore(EngineConfig("e", steps_in_flight=3))
    prompt = tools.prompt("a", 20)
    assert not engine.can_schedule()
    assert not engine.can_execute()
    assert not engine.can_collect()
    engine.add_request(Request("a", list(prompt.token_ids), 9))
    for steps in (1, 2, 3):
        assert engine.can_schedule()
        assert engine.schedule()
        assert engine.steps_in_flight == steps
    assert not engine.can_schedule(), "no more steps in flight than configured"
    engine.execute()
    assert engine.can_collect()
    assert engine.steps_in_flight == 3, "its output is in flight"
    engine.collect()
    assert engine.steps_in_flight == 2
    assert engine.can_schedule()


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_eos_stops_with_steps_in_flight(tools, steps_in_flight):
    engine = EngineCore(EngineConfig("e", steps_in_flight=steps_in_flight))
    engine.add_request(Request("a", list(tools.eos_after_8), 50))
    outputs = []
    while not outputs or engine.steps_in_flight:
        while engine.can_schedule() and engine.schedule():
            pass
        if engine.can_execute():
            engine.execute()
            engine.collect()
        outputs += engine.take_finished()
    (output,) = outputs
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == tools.tokens_alone(tools.eos_after_8, 8)
    assert len(output.token_ids) == 8
    assert tools.blocks_in_use(engine) == 0


@pytest.mark.parametrize("seam", ["step.start", "step.output_finalised"])
def test_a_step_or_its_output_can_be_held(tools, seam):
    seams, gate, asked = Seams(), [], []

    def hold(event):
        asked.append(event.step_id)
        return Hold(lambda: bool(gate), "closed")

    seams.on(seam, hold)
    engine = EngineCore(EngineConfig("e"), seams)
    engine.add_request(Request("a", [1, 2, 3], 1))
    for _ in range(3):
        assert engine.step() == []
    assert (engine.can_execute(), engine.can_collect()) == (False, False)
    assert asked == [1], "asked once a step"
    assert engine.steps_in_flight == 1, "and nothing overtakes it"
    gate.append(1)
    outputs = []
    while not outputs:
        outputs = engine.step()
    assert outputs[0].finish_reason is FinishReason.LENGTH


def test_step_does_it_all_for_an_engine_alone(tools):
    engine = EngineCore(EngineConfig("e"))
    prompts = [tools.prompt(f"r{i}", 5 + 9 * i) for i in range(5)]
    for prompt in prompts:
        engine.add_request(Request(prompt.request_id, list(prompt.token_ids), prompt.max_tokens))
    outputs = {}
    while engine.scheduler.has_work:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
    assert outputs == {p.request_id: tools.tokens_alone(p.token_ids, p.max_tokens) for p in prompts}


def test_an_engine_keeps_nothing_of_requests_that_ended(tools, new_world):
    """Of every way to end: served, aborted, failed, recomputed; the next request flushes what workers are told."""
    for mode, load_failure in (("enforce", "recompute"), ("enforce", "fail"), ("off", "fail")):
        world = new_world(mode, load_failure)
        names = [f"gone-{i}" for i in range(6)]
        prompts = [tools.prompt(name, 20 + 7 * i) for i, name in enumerate(names)]
        world.run(prompts[:3])
        params = [world.run_producer(prompt) for prompt in prompts[3:]]
        world.load(prompts[3], params[0] | {"kv_checksums": None})
        world.load(prompts[4], params[1] | {"remote_engine_id": "nobody"})
        world.load(prompts[5], params[2])
        assert tools.mentions(world.d, set(names))
        world.d.abort(names[5])
        world.deliver()
        world.finish()
        world.p.connector.end_lease(names[4])
        world.settle()
        for engine in world.engines:
            engine.add_request(Request("last", [1], 1))
            world.finish(engine)
            assert tools.mentions(engine, set(names)) == []
            assert tools.blocks_in_use(engine) == 0
        assert tools.mentions(world.fabric, set(names)) == []


def test_verdicts_are_announced_by_the_engine_that_judged(tools, new_world):
    world = new_world()
    seen = []
    world.seams.on("consumer.verified", seen.append)
    world.run([tools.prompt("a", 40)])
    (event,) = seen
    assert (event.engine, event.request_id, event.verdict.status) == ("D", "a", VerdictStatus.VERIFIED)
    assert event.memory is world.d.memory


def test_a_pull_engine_is_wired_to_its_fabric():
    seams = Seams()
    fabric = Fabric(seams)
    engine = pull_engine(EngineConfig("X"), seams, VirtualClock(), fabric)
    assert fabric.peer("X") is engine.memory
    assert isinstance(engine.connector, PullScheduler)
