"""The contract of the seams: names, payloads and decisions are frozen, each is reached, and each decision acts.

What is written down here is a promise to everything outside the engine. Changing a line means changing faults,
oracles, recorded histories and whoever else listens.
"""

import dataclasses

import numpy as np
import pytest

from engine import seams as module
from engine.checksum.records import GroupBlocks, GroupSums, WorkerRecord
from engine.checksum.verdict import UnverifiedReason, VerdictStatus
from engine.seams import SEAMS, Change, CopyOp, Drop, Hold, Seams, Stage

ENGINE, REQUEST = {"engine": "str"}, {"request_id": "str"}
WHO = ENGINE | REQUEST
GROUPS = {"groups": "Groups"}
MEMORY = {"memory": "KVMemory"}
OP = {"op": "CopyOp", "num_ops": "int", "source": "KVMemory", "target": "KVMemory"}
IDS = {"block_ids": "tuple[int, ...]"}
TABLES = {"tables": "Mapping[int, tuple[int, ...]]"}
STEP = ENGINE | {"step_id": "int"}

FROZEN = {
    "producer.speculator_wrote": (
        "SpeculatorWrote",
        WHO | GROUPS | MEMORY | {"first_position": "int", "token_ids": "tuple[int, ...]"},
        (),
    ),
    "producer.kv_final": ("KVFinal", WHO | GROUPS | MEMORY, ()),
    "producer.blocks_to_checksum": ("BlocksToChecksum", WHO | GROUPS, ("change", "drop")),
    "producer.checksummed": ("Checksummed", WHO | GROUPS | MEMORY, ()),
    "producer.params_leave": ("ParamsLeave", WHO | {"params": "Mapping[str, Any]"}, ("change",)),
    "proxy.params_pass": ("ParamsPass", REQUEST | {"params": "Mapping[str, Any]"}, ("change", "hold")),
    "consumer.payload_decoded": ("PayloadDecoded", WHO | {"payload": "Payload | UnverifiedReason"}, ("change",)),
    "consumer.load_scheduled": ("LoadScheduled", WHO | GROUPS | MEMORY, ()),
    "consumer.load_finished": ("LoadFinished", WHO | GROUPS | MEMORY, ()),
    "consumer.verified": ("Verified", WHO | {"verdict": "Verdict"} | GROUPS | MEMORY, ()),
    "consumer.first_use": ("FirstUse", WHO | GROUPS | MEMORY, ()),
    "consumer.recompute_start": ("RecomputeStart", WHO, ()),
    "transfer.op_posted": ("OpPosted", WHO | OP, ("change", "drop", "hold")),
    "transfer.op_landed": ("OpLanded", WHO | OP, ()),
    "transfer.completion": ("Completion", WHO | {"to_producer": "bool"}, ("drop", "hold")),
    "transfer.carrier_pass": ("CarrierPass", WHO | {"checksums": "str | None"}, ("change",)),
    "worker.forward": ("Forward", WHO | {"first_position": "int", "token_ids": "tuple[int, ...]"} | IDS | TABLES, ()),
    "worker.record_leaves": ("RecordLeaves", ENGINE | {"record": "WorkerRecord"}, ("change", "drop")),
    "worker.record_arrives": ("RecordArrives", ENGINE | {"record": "WorkerRecord"}, ("change", "drop")),
    "blocks.allocated": ("BlocksAllocated", WHO | IDS, ()),
    "blocks.freed": ("BlocksFreed", WHO | IDS, ()),
    "request.preempted": ("Preempted", WHO, ()),
    "request.ended": ("RequestEnded", WHO | {"finish_reason": "str"}, ()),
    "step.start": ("StepStart", STEP, ("hold",)),
    "step.end": ("StepEnd", STEP, ()),
    "step.output_finalised": ("OutputFinalised", STEP, ("hold",)),
}
OTHERS = {
    "CopyOp": dict.fromkeys(
        ("index", "position", "layer", "part", "head", "source_block", "source_slot", "target_block", "target_slot",
         "num_slots", "source_replica", "target_replica", "group"), "int"
    ),
    "Change": {"event": "E"},
    "Drop": {},
    "Hold": {"until": "Callable[[], bool]", "why": "str"},
}  # fmt: skip
ALLOWED = [(seam, decision) for seam, (_, _, decisions) in FROZEN.items() for decision in decisions]


def field_types(kind):
    return {field.name: field.type for field in dataclasses.fields(kind)}


# ---- names, payloads, decisions


def test_the_seams_are_these():
    assert {name: (event.__name__, set(decisions)) for name, (event, decisions) in SEAMS.items()} == {
        name: (event, set(decisions)) for name, (event, _, decisions) in FROZEN.items()
    }


@pytest.mark.parametrize("seam", FROZEN)
def test_a_payload_has_these_fields_in_this_order(seam):
    event = SEAMS[seam][0]
    assert list(field_types(event).items()) == list(FROZEN[seam][1].items())
    assert event.__dataclass_params__.frozen
    assert not hasattr(make(seam), "__dict__"), "slots: no field that nobody promised"


@pytest.mark.parametrize("name", OTHERS)
def test_what_payloads_and_decisions_hold(name):
    assert list(field_types(getattr(module, name)).items()) == list(OTHERS[name].items())


def make(seam):
    """An event without content: `emit` looks at its type alone."""
    event = SEAMS[seam][0]
    return event(*[None] * len(dataclasses.fields(event)))


def decision(kind, seam):
    return {"change": Change(make(seam)), "drop": Drop(), "hold": Hold(lambda: True, "why")}[kind]


@pytest.mark.parametrize("seam", FROZEN)
@pytest.mark.parametrize("kind", ["change", "drop", "hold"])
def test_a_seam_takes_its_decisions_and_no_others(seam, kind):
    seams = Seams()
    seams.on(seam, lambda event: decision(kind, seam))
    if kind in FROZEN[seam][2]:
        outcome = seams.emit(make(seam))
        assert (outcome.dropped, len(outcome.holds)) == (kind == "drop", kind == "hold")
    else:
        with pytest.raises(TypeError, match=f"seam {seam} does not take a {kind}"):
            seams.emit(make(seam))


@pytest.mark.parametrize("nonsense", [True, "drop", Drop, 0], ids=str)
def test_what_is_no_decision_is_an_error(nonsense):
    seams = Seams()
    seams.on("transfer.op_posted", lambda event: nonsense)
    with pytest.raises(TypeError, match=r"seam transfer\.op_posted does not take a"):
        seams.emit(make("transfer.op_posted"))


def test_a_change_to_another_kind_of_event_is_an_error():
    seams = Seams()
    seams.on("transfer.op_posted", lambda event: Change(make("step.end")))
    with pytest.raises(TypeError, match=r"seam transfer\.op_posted takes no StepEnd"):
        seams.emit(make("transfer.op_posted"))


def test_a_seam_that_does_not_exist_cannot_be_listened_to():
    with pytest.raises(ValueError, match=r"there is no seam 'consumer\.nothing'"):
        Seams().on("consumer.nothing", lambda event: None)


# ---- handlers


def test_handlers_run_in_the_order_of_their_stages():
    seams, order = Seams(), []

    def note(name):
        return lambda event: order.append(name)

    seams.on("step.end", note("after"), Stage.AFTER)
    seams.on("step.end", note("by default"))
    seams.on("step.end", note("before"), Stage.BEFORE)
    seams.on("step.end", note("fault"), Stage.FAULT)
    seams.emit(make("step.end"))
    assert order == ["before", "by default", "fault", "after"]


def params(**values):
    return module.ParamsLeave("P", "r", values)


def test_a_change_is_what_the_next_handler_sees():
    seams, seen = Seams(), []
    seams.on("producer.params_leave", lambda event: Change(params(**event.params, first=1)))
    seams.on("producer.params_leave", lambda event: Change(params(**event.params, second=2)))
    seams.on("producer.params_leave", seen.append, Stage.AFTER)
    outcome = seams.emit(params(zero=0))
    assert outcome.event == seen[0] == params(zero=0, first=1, second=2)


def test_a_drop_ends_it():
    seams, seen = Seams(), []
    seams.on("transfer.op_posted", lambda event: Drop())
    seams.on("transfer.op_posted", seen.append, Stage.AFTER)
    assert seams.emit(make("transfer.op_posted")).dropped
    assert seen == []


def test_holds_add_up():
    seams = Seams()
    for why in ("one", "two"):
        seams.on("step.start", lambda event, why=why: Hold(lambda: False, why))
    assert [hold.why for hold in seams.emit(make("step.start")).holds] == ["one", "two"]


def test_without_a_listener_an_event_goes_on_as_it_is():
    event = make("step.end")
    outcome = Seams().emit(event)
    assert outcome.event is event
    assert (outcome.dropped, outcome.holds) == (False, ())


def test_whether_anybody_listens_is_known():
    seams = Seams()
    assert not seams.listened("worker.forward")
    seams.on("worker.forward", lambda event: None)
    assert seams.listened("worker.forward")


# ---- every seam is reached


def spoil(event):
    token = event.memory.slots(event.groups[0].block_ids[:1])[0, 0, 0].copy()
    token[0] ^= 1
    event.memory.write_slot(0, 0, event.groups[0].block_ids[0], 0, token)


def test_every_seam_is_reached_with_its_payload(tools, new_world):
    """Clean loads, one that is recomputed, and a pool that is too small for all."""
    world = new_world(
        "enforce", "recompute", producer={"num_blocks": 9}, consumer={"num_blocks": 9}, prefix_caching=False
    )
    reached = {}
    for seam in SEAMS:
        world.seams.on(seam, lambda event, seam=seam: reached.setdefault(seam, event) and None)
    world.seams.on("consumer.load_finished", lambda event: spoil(event) if event.request_id == "r1" else None)
    prompts = [tools.prompt(f"r{i}", 20 + 7 * i, max_tokens=60) for i in range(4)]
    answers = world.run(prompts)
    assert answers["r1"].recomputed
    guesses = new_world(steps_in_flight=1, speculator="ngram")
    guesses.seams.on("producer.speculator_wrote", lambda e: reached.setdefault("producer.speculator_wrote", e) and None)
    guesses.run(prompts[:1])
    pushed = new_world(transfer="push")
    pushed.seams.on("transfer.carrier_pass", lambda event: reached.setdefault("transfer.carrier_pass", event) and None)
    pushed.run(prompts[:1])
    assert set(reached) == set(SEAMS)
    for seam, event in reached.items():
        assert type(event) is SEAMS[seam][0]
    assert all(answers[p.request_id].token_ids == tools.tokens_alone(p.token_ids, 60) for p in prompts)


def trace(world, prompts):
    """Everything that a run gives: answers, parameters, and how many actions it took."""
    answers = world.run(prompts)
    sent = {name: dict(output.kv_transfer_params) for name, output in world.prefilled.items()}
    return answers, sent, world.clock.now, [e.memory.slots(tuple(range(64))).tobytes() for e in world.engines]


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_with_listeners_that_only_look_is_no_other(tools, new_world, seed):
    prompts = [tools.prompt(f"r{i}", 10 + 13 * i) for i in range(6)]
    alone = new_world(seed=seed, max_batched_tokens=16)
    watched = new_world(seed=seed, max_batched_tokens=16)
    seen = []
    for seam in SEAMS:
        for stage in Stage:
            watched.seams.on(seam, lambda event: seen.append(type(event)), stage)
    assert trace(watched, prompts) == trace(alone, prompts)
    assert len(seen) > 1000


# ---- every decision acts


def one_load(new_world, tools, seam, handler, mode="log"):
    """One load with a handler on one seam. Returns the world and, if it came to that, the answer."""
    world = new_world(mode, transfer="push" if seam == "transfer.carrier_pass" else "pull")
    world.seams.on(seam, handler)
    prompt = tools.prompt("a", 40)
    world.arrivals.append(prompt)
    for _ in range(3000):
        if "a" in world.answers:
            break
        if world.actions():
            world.act()
    return world, world.answers.get("a")


def once_released(new_world, tools, seam, handler_of):
    """Nothing happens until the gate opens, and then all goes well."""
    gate, calls = [], []
    world = new_world("log")

    def handler(event):
        calls.append(event)
        return handler_of(event, Hold(lambda: bool(gate), f"{seam} waits")) if not gate else None

    world.seams.on(seam, handler)
    prompt = tools.prompt("a", 40)
    world.arrivals.append(prompt)
    for _ in range(3000):
        if world.actions():
            world.act()
    assert calls
    assert "a" not in world.answers
    gate.append(1)
    world.act_until(lambda: "a" in world.answers)
    assert world.answers["a"].verdict.status is VerdictStatus.VERIFIED
    assert world.answers["a"].token_ids == tools.tokens_alone(prompt.token_ids, prompt.max_tokens)


def ends(seam, handler, status, reason=None):
    """The decision shows in the verdict."""

    def check(new_world, tools):
        _, answer = one_load(new_world, tools, seam, handler)
        assert (answer.verdict.status, answer.verdict.reason) == (status, reason)

    return check


def holds(seam, handler_of=lambda event, hold: hold):
    return lambda new_world, tools: once_released(new_world, tools, seam, handler_of)


def never_ends(seam, handler):
    def check(new_world, tools):
        world, answer = one_load(new_world, tools, seam, handler)
        assert answer is None
        assert world.d.scheduler.num_loading == 1
        assert world.fabric.num_pending == 0
        assert tools.blocks_in_use(world.p) == 0, "the other notice was not dropped"

    return check


def first_block_only(event):
    blocks = event.groups[0]
    fewer = GroupBlocks(0, blocks.block_size, 0, blocks.block_ids[:1], blocks.num_tokens)
    return Change(dataclasses.replace(event, groups={0: fewer}))


def without_checksums(event):
    return Change(dataclasses.replace(event, params={k: v for k, v in event.params.items() if k != "kv_checksums"}))


def other_source(event):
    values = {name: getattr(event.op, name) for name in CopyOp.__slots__}
    return Change(dataclasses.replace(event, op=CopyOp(**values | {"source_block": 60})))


def other_values(event):
    if event.engine != "D":
        return None
    sums = event.record.groups[0]
    altered = GroupSums(sums.blocks, sums.fingerprint, sums.values + np.uint64(1))
    return Change(dataclasses.replace(event, record=WorkerRecord("a", 0, 0, {0: altered})))


def lost_on_d(event):
    return Drop() if event.engine == "D" else None


def lost_to_d(event):
    return None if event.to_producer else Drop()


UNVERIFIED, MISMATCH = VerdictStatus.UNVERIFIED, VerdictStatus.MISMATCH
POSTED, LEAVES, ARRIVES = "transfer.op_posted", "worker.record_leaves", "worker.record_arrives"
SENDS = "producer.blocks_to_checksum"
EFFECTS = {
    (SENDS, "change"): ends(SENDS, first_block_only, UNVERIFIED, "no_checksums"),
    (SENDS, "drop"): ends(SENDS, lambda e: Drop(), UNVERIFIED, "no_checksums"),
    ("producer.params_leave", "change"): ends(
        "producer.params_leave", without_checksums, UNVERIFIED, "no_checksums"
    ),
    ("proxy.params_pass", "change"): ends("proxy.params_pass", without_checksums, UNVERIFIED, "no_checksums"),
    ("proxy.params_pass", "hold"): holds("proxy.params_pass"),
    ("consumer.payload_decoded", "change"): ends(
        "consumer.payload_decoded",
        lambda e: Change(dataclasses.replace(e, payload=UnverifiedReason.INVALID)),
        UNVERIFIED,
        "invalid",
    ),
    (POSTED, "change"): ends(POSTED, other_source, MISMATCH),
    (POSTED, "drop"): ends(POSTED, lambda e: Drop() if e.op.index == 5 else None, MISMATCH),
    (POSTED, "hold"): holds(POSTED, lambda e, hold: hold if e.op.index == 7 else None),
    ("transfer.completion", "drop"): never_ends("transfer.completion", lost_to_d),
    ("transfer.completion", "hold"): holds(
        "transfer.completion", lambda e, hold: None if e.to_producer else hold
    ),
    ("transfer.carrier_pass", "change"): ends(
        "transfer.carrier_pass",
        lambda e: Change(dataclasses.replace(e, checksums=None)),
        UNVERIFIED,
        "no_checksums",
    ),
    (LEAVES, "change"): ends(LEAVES, other_values, MISMATCH),
    (LEAVES, "drop"): ends(LEAVES, lost_on_d, UNVERIFIED, "workers_missing"),
    (ARRIVES, "change"): ends(ARRIVES, other_values, MISMATCH),
    (ARRIVES, "drop"): ends(ARRIVES, lost_on_d, UNVERIFIED, "workers_missing"),
    ("step.start", "hold"): holds("step.start", lambda e, hold: hold if e.engine == "D" else None),
    ("step.output_finalised", "hold"): holds("step.output_finalised"),
}  # fmt: skip


def test_the_effect_of_every_decision_is_tested():
    assert set(EFFECTS) == set(ALLOWED)


@pytest.mark.parametrize(("seam", "kind"), ALLOWED, ids=str)
def test_a_decision_acts(new_world, tools, seam, kind):
    EFFECTS[seam, kind](new_world, tools)
