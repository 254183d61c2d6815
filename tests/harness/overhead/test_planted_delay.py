"""The delay of a study's positive control strikes what is summed, before its first token, and nobody by a slip."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from engine.checksum.policy import ChecksumSettings
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.connectors.fabric import Fabric
from engine.core import pull_engine
from engine.errors import InputError
from engine.request import Request
from engine.seams import Seams
from harness.commands.serve import serve
from harness.overhead.planted_delay import PlantedDelay, parse_delay
from harness.remote.engine_side import RemoteSeams


class Times:
    """A clock that only sleeping and steps move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 9))
        self.now += seconds


def prefill(delay: PlantedDelay, times: Times, seams: Seams, ask: bool | None, length: int = 40) -> float:
    """Prefill one prompt on a producer whose every step takes a second. Returns when it had its first token."""
    settings = ChecksumSettings(kv_checksum_mode="log", allow_checksum_switch=True)
    engine = pull_engine(
        EngineConfig("P", checksum=settings, max_batched_tokens=16, steps_in_flight=1),
        seams,
        VirtualClock(),
        Fabric(seams),
    )
    delay.attach(seams)
    began = times.now
    engine.add_request(Request("r", [7] * length, 1, {"do_remote_decode": True}, ask))
    while not engine.step():
        times.now += 1
    return times.now - began


@pytest.mark.parametrize("make_seams", [Seams, lambda: RemoteSeams("P")])
def test_it_strikes_what_is_summed_and_nothing_else(make_seams: Callable[[], Seams]) -> None:
    for ask, slept in ((None, [0.05]), (True, [0.05]), (False, [])):
        times = Times()
        delay = PlantedDelay(seconds=0.05, sleep=times.sleep, now=lambda times=times: times.now)  # type: ignore[misc]
        took = prefill(delay, times, make_seams(), ask)
        assert times.slept == slept
        assert took == pytest.approx(2 + sum(slept))


def test_a_part_of_the_time_that_the_request_has_taken() -> None:
    times = Times()
    delay = PlantedDelay(fraction=0.05, sleep=times.sleep, now=lambda: times.now)
    assert prefill(delay, times, Seams(), True) == pytest.approx(2.1)
    assert times.slept == [0.1]


def test_it_says_loudly_that_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_delay("5%").attach(Seams())
    assert "A DELAY IS PLANTED" in caplog.text


def test_it_keeps_nothing_of_a_request_that_has_ended() -> None:
    times = Times()
    delay = PlantedDelay(seconds=1, sleep=times.sleep, now=lambda: times.now)
    prefill(delay, times, Seams(), True)
    assert not delay._admitted
    assert not delay._summed


@pytest.mark.parametrize(
    ("text", "said"), [("50ms", "50 ms"), ("0.5ms", "0.5 ms"), ("5%", "5.00% of its time so far"), ("2.25%", "2.25%")]
)
def test_what_is_a_delay(text: str, said: str) -> None:
    assert said in str(parse_delay(text))


@pytest.mark.parametrize("text", ["", "5", "0ms", "0%", "-5%", "ms", "5 ms", "nan%", "1e3ms", "99999999ms", "60001ms"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(InputError, match="--plant-delay"):
        parse_delay(text)


def test_a_delay_of_nothing_is_none() -> None:
    for seconds, fraction in ((0.0, 0.0), (-1.0, 0.5), (float("nan"), 0.0), (float("inf"), 0.0)):
        with pytest.raises(ValueError, match="one must be positive"):
            PlantedDelay(seconds, fraction)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `kvchaos serve engine` would have started: its options."""
    found: list[Any] = []
    monkeypatch.setattr("harness.serve.serve_engine", lambda config, options: found.append((config, options)))
    return found


STUDY = ["--role", "producer", "--allow-checksum-switch"]


def run_serve(*arguments: str) -> Any:
    return CliRunner().invoke(serve, ["engine", "--port", "0", *arguments], catch_exceptions=True)


def test_a_study_has_it(started: list[Any]) -> None:
    assert run_serve(*STUDY, "--plant-delay", "5%").exception is None
    ((config, options),) = started
    assert config.checksum.allow_checksum_switch
    assert options.planted is not None


def test_a_normal_start_has_neither(started: list[Any]) -> None:
    assert run_serve("--role", "producer").exception is None
    ((config, options),) = started
    assert not config.checksum.allow_checksum_switch
    assert options.planted is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--role", "producer", "--plant-delay", "5%"],
        ["--role", "consumer", "--allow-checksum-switch", "--plant-delay", "5%"],
        [*STUDY, "--plant-delay", "5"],
        [*STUDY, "--plant-delay", "5%", "--control", "127.0.0.1:9"],
    ],
)
def test_nobody_gets_it_by_a_slip(started: list[Any], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCHAOS_CONTROL_TOKEN", "x" * 16)
    done = run_serve(*arguments)
    assert isinstance(done.exception, InputError)
    assert "--plant-delay" in str(done.exception)
    assert started == []
