from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from engine.seams import SEAMS, Completion, CopyOp, OpPosted, ParamsPass
from faults.levers import CHECKSUMS
from faults.moments import MOMENTS, is_moment
from faults.noop import Moment, Noop, NoopParams


def noop(at: str, load: int = 2) -> dict[str, Any]:
    return {"kind": "noop", "when": {"load": load, "at": at}}


def test_it_can_stand_for_every_moment_and_every_moment_has_a_seam() -> None:
    assert set(get_args(Moment)) == set(MOMENTS)
    assert set(MOMENTS.values()) <= set(SEAMS)


@pytest.mark.parametrize("policy", ["off", "fail_open", "fail_closed_fail", "fail_closed_recompute"])
@pytest.mark.parametrize("at", sorted(MOMENTS))
def test_it_reaches_its_moment_once_and_changes_nothing(sim, changed, at: str, policy: str) -> None:
    if at == "carrier_pass":
        if policy == "off":
            pytest.skip("without checksums nothing is carried")
        ran = sim(noop(at), policy=policy, topology={"transfer": "push"}).fault
    else:
        ran = sim(noop(at), policy=policy).fault
    (item,) = ran.evidence
    assert (item.fault, item.seam, item.request_id) == ("noop", MOMENTS[at], "r2")
    assert (item.before, item.after) == (None, None)
    for load in ran.seen.requests:
        assert changed(load.kv_final, load.load_finished) == changed(load.to_be_read, load.first_use) == set()
        assert load.tokens == load.wanted


def posted(index: int, num_ops: int) -> OpPosted:
    return OpPosted("consumer", "r2", CopyOp(index, 0, 0, 0, 0, 1, 0, 1, 0, 16), num_ops, None, None)


@pytest.mark.parametrize(
    ("at", "event", "reached"),
    [
        ("before_read", posted(0, 8), True),
        ("before_read", posted(1, 8), False),
        ("in_flight", posted(0, 8), True),
        ("mid_read", posted(4, 8), True),
        ("mid_read", posted(4, 9), True),
        ("mid_read", posted(0, 8), False),
        ("mid_read", posted(0, 1), True),
        ("after_read", Completion("consumer", "r2", to_producer=False), True),
        ("after_read", Completion("consumer", "r2", to_producer=True), False),
        ("params_pass", ParamsPass("r2", {}), True),
        ("params_pass", ParamsPass("r1", {}), False),
    ],
)
def test_when_a_moment_is_reached(at: str, event: Any, reached: bool) -> None:
    assert is_moment(at, event, "r2") is reached


def test_evidence_is_written_once(attach) -> None:
    seams, context = attach(noop("params_pass"))
    for request in ("r1", "r2", "r2"):
        seams.emit(ParamsPass(request, {}))
    assert [item.what for item in context.evidence] == ["params_pass was reached, nothing was done"]


@pytest.mark.parametrize("at", sorted(MOMENTS))
def test_needs(at: str) -> None:
    more = {CHECKSUMS} if at == "carrier_pass" else set()
    assert Noop.needs(NoopParams.model_validate(noop(at))) == {MOMENTS[at]} | more


def test_a_moment_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValidationError, match="before_checksum"):
        NoopParams.model_validate(noop("at_noon"))
