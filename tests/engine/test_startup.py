"""What an engine refuses at its start, and what it goes on without (CAR-3, CAR-5)."""

import logging

import pytest

from engine.checksum.policy import ChecksumSettings
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.pull import PullScheduler
from engine.core import EngineCore
from engine.errors import StartupError
from engine.startup import usable_policy


def pull():
    return PullScheduler("E", 10, VirtualClock())


def config(mode, **options):
    return EngineConfig("E", checksum=ChecksumSettings(kv_checksum_mode=mode), **options)


UNSUPPORTED = {
    "context parallelism (dcp 2, pcp 1)": {"dcp_size": 2},
    "context parallelism (dcp 1, pcp 4)": {"pcp_size": 4},
    "only the last of its 2 pipeline stages": {"pp_size": 2, "collects_all_stages": False},
}


@pytest.mark.req("CAR-5", "GAP-13")
@pytest.mark.parametrize("mode", ["log", "enforce"])
@pytest.mark.parametrize("says", UNSUPPORTED)
def test_what_the_protocol_leaves_out_disables_checksums_with_a_warning(says, mode, caplog):
    with caplog.at_level(logging.WARNING):
        policy = usable_policy(config(mode, **UNSUPPORTED[says]), pull())
    assert (policy.enabled, policy.fail_closed) == (False, False)
    (message,) = caplog.messages
    assert message.startswith("engine E: KV checksums are disabled, ")
    assert says in message


@pytest.mark.req("CAR-5")
@pytest.mark.parametrize("options", [*UNSUPPORTED.values(), {"collects_all_stages": False}, {"pp_size": 2}], ids=str)
def test_nothing_is_said_where_nothing_is_lost(options, caplog):
    one_reason = {"dcp_size", "pcp_size"} & set(options) or {"pp_size", "collects_all_stages"} <= set(options)
    mode = "off" if one_reason else "enforce"
    policy = usable_policy(config(mode, **options), pull())
    assert policy.enabled is (mode == "enforce")
    assert caplog.messages == []


@pytest.mark.req("CAR-3", "CAR-5")
def test_fail_closed_without_a_carrier_is_refused_whatever_else_is_left_out():
    with pytest.raises(StartupError, match="has no connector"):
        usable_policy(config("enforce", dcp_size=2), None)


@pytest.mark.req("CAR-5")
@pytest.mark.parametrize("mode", ["log", "enforce"])
@pytest.mark.parametrize("speculator", ["repeat_last", "ngram"])
def test_a_runner_that_cannot_checksum_after_its_speculator_refuses_and_names_it(mode, speculator):
    options = {"speculator": speculator, "steps_in_flight": 1, "checksums_after_speculator": False}
    with pytest.raises(StartupError, match=f"with the speculator {speculator}: this runner cannot checksum after"):
        EngineCore(config(mode, **options), connector=pull())
    assert not usable_policy(config("off", **options), pull()).enabled
    assert usable_policy(config(mode, **options | {"checksums_after_speculator": True}), pull()).enabled
    assert usable_policy(config(mode, checksums_after_speculator=False), pull()).enabled


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dcp_size": 0}, "dcp_size is 0"),
        ({"pcp_size": 0}, "pcp_size is 0"),
        ({"draft_tokens": 0}, "draft_tokens is 0"),
        ({"load_ticks": 0}, "load_ticks is 0"),
        ({"speculator": "eagle", "steps_in_flight": 1}, "speculator is 'eagle'"),
        ({"speculator": "ngram"}, "steps_in_flight is 2: a speculator"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options, says):
    with pytest.raises(StartupError, match=says):
        EngineConfig("E", **options)
