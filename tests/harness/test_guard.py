from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.seams import Change, Completion, Drop, Hold, ParamsPass, Stage
from harness.errors import CheckerError
from harness.guard import GuardedSeams

EVENT = ParamsPass("r1", {"x": 1})


def broken(event: Any) -> None:
    raise KeyError(event.request_id)


def test_a_handler_that_raises_is_a_broken_checker_and_says_which_where_and_why() -> None:
    seams = GuardedSeams()
    seams.on("proxy.params_pass", broken)
    with pytest.raises(CheckerError, match=r"broken at proxy\.params_pass: KeyError: 'r1'") as caught:
        seams.emit(EVENT)
    assert isinstance(caught.value.__cause__, KeyError)


def test_decisions_pass_as_they_are() -> None:
    seams = GuardedSeams()
    hold = Hold(lambda: True, "why")
    seams.on("proxy.params_pass", lambda event: Change(ParamsPass(event.request_id, {"x": 2})))
    seams.on("proxy.params_pass", lambda event: hold)
    seams.on("transfer.completion", lambda event: Drop())
    outcome = seams.emit(EVENT)
    assert outcome.event.params == {"x": 2}
    assert [held.why for held in outcome.holds] == ["why"]
    assert outcome.holds[0].until()
    assert seams.emit(Completion("d", "r1", to_producer=False)).dropped


def test_stages_keep_their_order() -> None:
    seams, seen = GuardedSeams(), []
    for stage in (Stage.AFTER, Stage.FAULT, Stage.BEFORE):
        seams.on("proxy.params_pass", lambda event, stage=stage: seen.append(stage), stage)
    seams.emit(EVENT)
    assert seen == [Stage.BEFORE, Stage.FAULT, Stage.AFTER]


def test_a_hold_whose_condition_raises_is_a_broken_checker() -> None:
    """The condition is asked by the engine, outside of any handler; still it is not the engine's bug."""

    def until() -> bool:
        raise ZeroDivisionError("no")

    seams = GuardedSeams()
    seams.on("proxy.params_pass", lambda event: Hold(until, "why"))
    (hold,) = seams.emit(EVENT).holds
    with pytest.raises(CheckerError, match=r"at proxy\.params_pass: ZeroDivisionError: no"):
        hold.until()


@pytest.mark.parametrize("decision", [Drop(), Change(Completion("d", "r1", to_producer=True)), "nonsense"])
def test_a_decision_that_the_seam_does_not_take_is_a_broken_checker(decision: Any) -> None:
    seams = GuardedSeams()
    seams.on("proxy.params_pass", lambda event: decision)
    with pytest.raises(CheckerError, match=r"proxy\.params_pass"):
        seams.emit(EVENT)


def test_a_handler_without_a_name_is_named_without_its_address() -> None:
    """The message goes into the history, which must be the same in every process."""
    seams = GuardedSeams()
    seams.on("proxy.params_pass", partial(broken))
    with pytest.raises(CheckerError, match=r"partial at proxy\.params_pass") as caught:
        seams.emit(EVENT)
    assert "0x" not in str(caught.value)


def test_ctrl_c_is_no_broken_checker() -> None:
    def stop(event: Any) -> None:
        raise KeyboardInterrupt

    seams = GuardedSeams()
    seams.on("proxy.params_pass", stop)
    with pytest.raises(KeyboardInterrupt):
        seams.emit(EVENT)
