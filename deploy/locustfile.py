"""Streamed completions for locust, checksums off and on by turns, with the time to first token as metrics of their own.

    locust -f deploy/locustfile.py --host http://127.0.0.1:8000                  # then open http://localhost:8089
    locust -f deploy/locustfile.py --host http://127.0.0.1:8000 --headless -u 1 --kv-blocks 20 --kv-rows rows.csv
    kvchaos overhead --rows rows.csv                                             # what these rows come to

`--master` and `--worker` spread it over machines: the master's options count, and all rows come together there.

A user sends a block (one prompt four times, checksums off, on, on, off, or the other way round), then the next. So this
is a closed loop: a slower server gets fewer requests. `kvchaos overhead` has the open loop, and docs/overhead.md says
what the difference is. It runs where kvchaos is installed: prompts, rows and the reading of a stream are its.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
import httpx
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner

from engine.errors import KVChaosError
from harness.overhead.client import answer_of
from harness.overhead.design import SLOTS, Cell, Design, Load, arms, prompt, prompt_id
from harness.overhead.rows import ARM_ON, COLUMNS, Row, RowsFile
from harness.overhead.sse import Reading, error_of, one_line

_TIMEOUT_S = 600.0
_BLOCKS_A_WORKER = 1_000_000
# It would say a line for each request.
logging.getLogger("httpx").setLevel(logging.WARNING)


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("KV checksums")

    def add(name: str, default: Any, text: str) -> None:
        variable = name.removeprefix("--").replace("-", "_").upper()
        group.add_argument(name, env_var=variable, type=type(default), default=default, help=text)

    add("--kv-lengths", "1000", "Tokens of the prompts, such as 1000,8000; blocks take them in turn.")
    add("--kv-output-tokens", 4, "Tokens to be generated.")
    add("--kv-seed", 0, "Of the prompts.")
    add("--kv-blocks", 0, "End when so many blocks of requests are answered; 0: never.")
    add("--kv-warmup", 1, "Blocks of each process and length that are marked as warm-up.")
    add("--kv-switch", "kv_checksum", "Key of a request that is false or true.")
    add("--kv-model", "kvchaos", "The model that requests name.")
    add("--kv-rows", "", "A new file for one row a request; %%Y and such are the time. Default: none.")


class Shared:
    """What all users of this process share: the design, numbers of blocks, and where rows go."""

    def __init__(self, environment: Environment) -> None:
        """Raises InputError for a design that cannot be run, and for rows that cannot be written."""
        self.begun = time.perf_counter()
        self.for_master: list[dict[str, Any]] = []
        self._environment = environment
        self._is_worker = isinstance(environment.runner, WorkerRunner)
        self._numbers = itertools.count()
        self.configure()
        path = time.strftime(self.options.kv_rows, time.gmtime())
        self._file = RowsFile(Path(path)) if path and not self._is_worker else None

    def configure(self) -> None:
        """Take the options as they are now: a worker gets those of its master, and the web page can change them."""
        self.options = options = self._environment.parsed_options
        self._kept = 0
        self.design = Design(
            lengths=tuple(int(length) for length in options.kv_lengths.split(",")),
            loads=(Load.LOW,),
            seed=options.kv_seed,
            output_tokens=options.kv_output_tokens,
            warmup_blocks=options.kv_warmup,
            # Nobody knows what caches a server has.
            unique_starts=True,
        )

    def next_block(self) -> tuple[Cell, int, bool]:
        """The cell of a block that nobody else sends, its number, and whether it is warm-up. One user is low load."""
        turn, which = divmod(next(self._numbers), len(self.design.cells))
        runner = self._environment.runner
        worker = max(0, runner.worker_index) if self._is_worker else 0
        alone = not self._is_worker and runner.user_count <= 1
        cell = Cell(self.design.cells[which].prompt_tokens, Load.LOW if alone else Load.HIGH)
        return cell, worker * _BLOCKS_A_WORKER + turn, turn < self.design.warmup_blocks

    def keep(self, row: Row) -> None:
        """Write a row, or have it sent to the master. The process that writes counts, and ends it all."""
        if self._is_worker:
            self.for_master.append({name: getattr(row, name) for name in COLUMNS})
            return
        if self._file is not None:
            self._file.append(row)
        self._kept += 1
        runner = self._environment.runner
        if self._kept == SLOTS * self.options.kv_blocks and runner is not None:
            # Not from here: it waits until every user has ended, and this may be one.
            gevent.spawn(runner.quit)


_shared: dict[str, Shared] = {}


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    try:
        _shared["load"] = Shared(environment)
    except (KVChaosError, ValueError) as error:
        raise SystemExit(f"locustfile: {error}") from None


@events.test_start.add_listener
def _configure(environment: Environment, **_: Any) -> None:
    _shared["load"].configure()


@events.report_to_master.add_listener
def _send_rows(client_id: str, data: dict[str, Any]) -> None:
    data["kv_rows"], _shared["load"].for_master = _shared["load"].for_master, []


@events.worker_report.add_listener
def _take_rows(client_id: str, data: dict[str, Any]) -> None:
    for fields in data.get("kv_rows", ()):
        _shared["load"].keep(Row(**fields))


class Blocks(User):
    """Sends one block after another, one request at a time."""

    wait_time = constant(0)

    def on_start(self) -> None:
        # A connection a request, so that all pay the same for it.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(timeout=_TIMEOUT_S, limits=limits, trust_env=False)

    def on_stop(self) -> None:
        self._client.close()

    @task
    def block(self) -> None:
        load = _shared["load"]
        cell, number, warmup = load.next_block()
        for slot, arm in enumerate(arms(number)):
            self._request(load, cell, number, slot, arm, warmup)

    def _request(self, load: Shared, cell: Cell, block: int, slot: int, arm: str, warmup: bool) -> None:
        options, name, request_id = load.options, prompt_id(cell, block, 0), uuid.uuid4().hex
        body = {
            "model": options.kv_model,
            "prompt": prompt(load.design, cell, block, slot, 0),
            "max_tokens": options.kv_output_tokens,
            "temperature": 0,
            "stream": True,
            options.kv_switch: arm == ARM_ON,
        }
        started, sent = time.time(), time.perf_counter() - load.begun
        reading, status = self._read(load, body, request_id)
        answer = answer_of(reading, status, sent, sent, time.perf_counter() - load.begun)
        row = Row(
            study="overhead",
            block=block,
            slot=slot,
            arm=arm,
            cell=cell.id,
            prompt_tokens=cell.prompt_tokens,
            load=str(cell.load),
            prompt_id=name,
            request_id=request_id,
            warmup=int(warmup),
            intended_s=sent,
            **asdict(answer),
        )
        load.keep(row)
        self._tell_locust(row, started)

    def _read(self, load: Shared, body: dict[str, Any], request_id: str) -> tuple[Reading, int]:
        reading, status = Reading(), 0
        try:
            url = f"{(self.host or '').rstrip('/')}/v1/completions"
            headers = {"x-request-id": request_id}
            with self._client.stream("POST", url, json=body, headers=headers) as response:
                status = response.status_code
                if status != 200:
                    response.read()
                    reading.error = f"HTTP {status}: {error_of(_json(response))}"
                else:
                    for line in response.iter_lines():
                        reading.line(line, time.perf_counter() - load.begun)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reading.error = one_line(f"{type(error).__name__}: {error}")
        return reading, status

    def _tell_locust(self, row: Row, started: float) -> None:
        failed = RuntimeError(row.error) if row.error else None
        times = {"TTFT": row.ttft_s, "inter-token": row.itl_s, "total": row.end_s - row.sent_s}
        for metric, seconds in times.items():
            if seconds is None and not (failed and metric == "TTFT"):
                continue
            self.environment.events.request.fire(
                request_type=row.cell,
                name=f"{metric} {row.arm}",
                response_time=(seconds if seconds is not None else row.end_s - row.sent_s) * 1000,
                response_length=row.output_tokens,
                exception=failed,
                context={},
                start_time=started,
                url=self.host,
            )


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
