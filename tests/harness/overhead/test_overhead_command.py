"""`kvchaos overhead`, from its arguments to its files; the server answers at once, and time is real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.overhead import arrivals, pair, session, study
from harness.overhead.client import make_client
from harness.overhead.design import Kind
from harness.overhead.pair import OwnPair, PairSettings
from harness.overhead.present import exit_code
from harness.overhead.rows import Row, RowsFile, read_rows
from harness.overhead.session import Judged, judge_rows

QUICK = ["--url", "http://127.0.0.1:9", "--length", "40", "--load", "low"]
SHORT = [*QUICK, "--max-blocks", "8", "--time-limit", "60"]


class Instant(httpx.AsyncBaseTransport):
    """Answers at once, but never to the request of that number, at which it sends a signal to this process."""

    def __init__(self) -> None:
        self.count = 0
        self.interrupt_at: tuple[int, signal.Signals] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.count += 1
        if self.interrupt_at is not None and self.count == self.interrupt_at[0]:
            os.kill(os.getpid(), self.interrupt_at[1])
            await asyncio.Event().wait()
        checked = json.loads(await request.aread())["kv_checksum"]
        verdict = "verified" if checked else "not_checked"
        return httpx.Response(200, stream=_Stream(verdict))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, verdict: str) -> None:
        self._verdict = verdict

    async def __aiter__(self) -> AsyncIterator[bytes]:
        choices = [{"text": "a"}]
        yield f"data: {json.dumps({'choices': choices, 'kv_load': {'verdict': self._verdict}})}\n\n".encode()
        yield b"data: [DONE]\n\n"


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instant]:
    transport = Instant()
    monkeypatch.setattr(session, "make_client", lambda timeout_s: make_client(timeout_s, transport))
    monkeypatch.setattr(arrivals, "pause", lambda seed, shortest_s: 0.0)
    monkeypatch.setattr(study, "_LEAD_S", 0.0)
    before, hangup = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    yield transport
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGHUP) is hangup


def test_a_study_leaves_its_rows_and_says_what_it_found(kvchaos: Callable[..., Any], instant: Instant) -> None:
    done = kvchaos("overhead", *SHORT)
    assert done.code in (0, 1, 2), done.err
    folder = Path("runs/overhead/latest")
    rows = read_rows(folder / "rows.csv")
    assert len(rows) == instant.count == 2 + 4 * (8 + 1)
    kept = json.loads((folder / "study.json").read_text())
    assert kept["design"]["lengths"] == [40]
    assert kept["command"].startswith("kvchaos overhead --url http://127.0.0.1:9")
    assert kept["stopped"] == {"40tok-low": "blocks"} or kept["stopped"] == {"40tok-low": "precise"}
    assert "40tok-low" in done.out
    assert "16 requests, 0 failed" in done.out


def test_the_rows_can_be_judged_again(kvchaos: Callable[..., Any], instant: Instant) -> None:
    first = kvchaos("overhead", *SHORT, "--json").json
    again = kvchaos("overhead", "--rows", "runs/overhead/latest/rows.csv", "--json").json
    assert again["cells"] == first["cells"]
    assert again["exit_code"] == first["exit_code"]
    assert instant.count == 2 + 4 * (8 + 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_the_rows_and_judges_them(
    kvchaos: Callable[..., Any], instant: Instant, number: signal.Signals
) -> None:
    """In the middle of the tenth counted block; SIGTERM is what docker sends."""
    instant.interrupt_at = (2 + 4 * 10 + 2, number)
    done = kvchaos("overhead", *QUICK, "--time-limit", "600", "--margin", "0.0001", "--json")
    assert done.code == 130
    rows = read_rows(Path("runs/overhead/latest/rows.csv"))
    assert len(rows) == 2 + 4 * 10 + 1
    assert done.json["cells"][0]["blocks"] == 9
    assert done.json["exit_code"] == 130
    assert done.json["stopped"] == {"40tok-low": "interrupted"}
    assert json.loads(Path("runs/overhead/latest/study.json").read_text())["interrupted"] is True


def test_sigterm_ends_a_study_that_a_script_left_in_the_background(
    kvchaos: Callable[..., Any], instant: Instant
) -> None:
    """Its shell has it ignore SIGINT."""
    instant.interrupt_at = (2 + 4 * 10 + 2, signal.SIGTERM)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = kvchaos("overhead", *QUICK, "--time-limit", "600", "--margin", "0.0001", "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == 130
    assert done.json["cells"][0]["blocks"] == 9


def test_a_signal_while_the_servers_start_ends_them_too(
    kvchaos: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Starting(OwnPair):
        def _start(self, name: str, arguments: list[str]) -> str:
            signal.raise_signal(signal.SIGTERM)
            return "http://127.0.0.1:9"

        def _end(self) -> None:
            ended.append("ended")
            super()._end()

    monkeypatch.setattr(pair, "OwnPair", Starting)
    assert kvchaos("overhead", "--length", "40", "--load", "low").code == 130
    assert ended == ["ended"]


def test_an_interrupt_before_the_first_block_leaves_what_there_is(
    kvchaos: Callable[..., Any], instant: Instant
) -> None:
    instant.interrupt_at = (2, signal.SIGINT)
    done = kvchaos("overhead", *QUICK)
    assert done.code == 130
    assert "No block beyond warm-up" in done.out
    assert len(read_rows(Path("runs/overhead/latest/rows.csv"))) == 1


def test_a_server_that_is_not_there(kvchaos: Callable[..., Any]) -> None:
    done = kvchaos("overhead", *SHORT)
    assert done.code == 70
    assert "http://127.0.0.1:9/v1/completions does not answer: ConnectError" in done.err
    assert "Traceback" not in done.err
    assert len(read_rows(Path("runs/overhead/latest/rows.csv"))) == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--length", "9000"], "an engine holds 8192"),
        (["--length", "0"], "--length"),
        (["--load", "middle"], "'middle' is not one of"),
        (["--margin", "0"], "a margin of 0"),
        (["--margin", "nan"], "a margin of nan"),
        (["--utilisation", "100"], "queues grow"),
        (["--max-blocks", "4"], "at most 4 blocks"),
        (["--url", "127.0.0.1:8000"], "--url 127.0.0.1:8000: use a URL"),
        (["--url", "http://h:99999"], "--url http://h:99999: use a URL"),
        (["--url", "http://h", "--url-on", "http://i", "--url-off", "http://j"], "give the one pair, or the two"),
        (["--url-on", "http://i"], "--url-off and --url-on: give both"),
        (["--url", "http://h", "--producer-url", "http://i"], "--producer-url and --consumer-url: give both"),
        (["--producer-url", "http://h", "--consumer-url", "http://i"], "give both, and --url"),
        (["--aa", "--planted", "5%"], "--aa and --planted"),
        (["--planted", "much"], "use milliseconds"),
        (["--url", "http://h", "--planted", "5%"], "only a pair that this command starts can be delayed"),
        (["--rows", "nowhere.csv"], "nowhere.csv: cannot be read"),
    ],
)
def test_bad_arguments(kvchaos: Callable[..., Any], arguments: list[str], why: str) -> None:
    done = kvchaos("overhead", *arguments)
    assert done.code == 64, done.err
    assert why in done.err
    assert not Path("runs").exists()


def test_rows_of_two_studies_are_not_mixed(kvchaos: Callable[..., Any], instant: Instant) -> None:
    kvchaos("overhead", *SHORT)
    rows = read_rows(Path("runs/overhead/latest/rows.csv"))
    with RowsFile(Path("mixed.csv")) as file:
        for row in (*rows, replace(rows[0], study="aa")):
            file.append(row)
    done = kvchaos("overhead", "--rows", "mixed.csv")
    assert done.code == 64
    assert "rows of 2 studies (aa, overhead)" in done.err


def row(block: int, slot: int, arm: str, ttft: float) -> Row:
    return Row(
        study="overhead",
        block=block,
        slot=slot,
        arm=arm,
        cell="c",
        prompt_tokens=40,
        load="low",
        prompt_id=f"p{block}",
        request_id=f"{block}-{slot}",
        warmup=0,
        intended_s=0.0,
        sent_s=0.0,
        first_token_s=ttft,
        end_s=ttft,
        ttft_s=ttft,
        itl_s=None,
        output_tokens=1,
        status=200,
        error="",
        verdict="",
    )


def rows_with(difference: float) -> list[Row]:
    """Twelve blocks in which arm B takes so many seconds more than arm A's 1 s."""
    return [
        row(block, slot, arm, 1.0 + (difference if arm == "B" else 0.0) + 1e-5 * (block % 3))
        for block in range(12)
        for slot, arm in enumerate("ABBA" if block % 2 == 0 else "BAAB")
    ]


@pytest.mark.parametrize(
    ("kind", "difference", "code"),
    [
        (Kind.OVERHEAD, 0.0, 0),
        (Kind.OVERHEAD, 0.02, 1),
        (Kind.OVERHEAD, -0.02, 2),
        (Kind.AA, 0.0, 0),
        (Kind.AA, 0.02, 1),
        (Kind.PLANTED, 0.05, 0),
        (Kind.PLANTED, 0.0, 1),
    ],
)
def test_the_exit_code_is_the_verdict(kind: Kind, difference: float, code: int) -> None:
    assert exit_code(kind, judge_rows(rows_with(difference), 0.01)) == code


def test_too_few_rows_are_never_a_success() -> None:
    assert exit_code(Kind.OVERHEAD, Judged((), {}, {})) == 2
    good = judge_rows(rows_with(0.0), 0.01)
    assert exit_code(Kind.OVERHEAD, replace(good, not_judged={"d": "why"})) == 2


def test_a_cell_that_never_got_beyond_warm_up_is_not_a_success() -> None:
    """Time was up: the cells before it are precise, and nobody knows of this one."""
    warm = replace(row(0, 0, "A", 1.0), cell="d", warmup=1)
    judged = judge_rows([*rows_with(0.0), warm], 0.01, cells=["c", "d", "e"])
    assert [found.cell for found in judged.estimates] == ["c"]
    assert judged.not_judged == dict.fromkeys("de", "no block beyond warm-up: it takes more time")
    assert exit_code(Kind.OVERHEAD, judged) == 2
    assert set(judge_rows([*rows_with(0.0), warm], 0.01).not_judged) == {"d"}


def test_the_own_pair_holds_what_the_study_sends_at_once() -> None:
    settings = PairSettings(longest=8004, at_once=8, plant_delay="5%")
    producer, consumer = settings.engine_arguments("producer"), settings.engine_arguments("consumer")
    assert producer[producer.index("--num-blocks") + 1] == str(8 * 501 + 1)
    assert "--no-prefix-caching" in producer
    assert "--control" not in producer
    assert producer[-2:] == ["--plant-delay", "5%"]
    assert "--plant-delay" not in consumer
