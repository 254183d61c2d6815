"""deploy/locustfile.py, run by locust in a process of its own (locust patches sockets) against a server in this one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.server.running import bind
from harness.overhead.rows import read_rows
from harness.overhead.stats import estimate

PATIENCE_S = 120


class Pair:
    """Answers at once with two tokens; refuses the numbers of `refuses`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuses: frozenset[int] = frozenset()
        listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = Starlette(routes=[Route("/v1/completions", self._answer, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    async def _answer(self, http: Request) -> Response:
        body = await http.json()
        self.bodies.append(body)
        if len(self.bodies) in self.refuses:
            return JSONResponse({"error": {"message": "full"}}, 503)
        return StreamingResponse(_events(body["kv_checksum"]), media_type="text/event-stream")

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)


async def _events(checked: bool) -> AsyncIterator[str]:
    load = {"verdict": "verified" if checked else "not_checked"}
    for more in ({}, {"kv_load": load}):
        yield f"data: {json.dumps({'choices': [{'text': 'a'}], **more})}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture
def pair() -> Iterator[Pair]:
    running = Pair()
    yield running
    running.stop()


@pytest.fixture
def locust(root: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        file = str(root / "deploy" / "locustfile.py")
        command = [sys.executable, "-m", "locust", "-f", file, "--headless", "-u", "1", "--only-summary", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)

    return run


def test_blocks_of_both_arms_and_a_row_for_each_request(
    pair: Pair, locust: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    pair.refuses = frozenset({7})
    done = locust("--host", pair.url, "--kv-lengths", "40,60", "--kv-blocks", "20", "--kv-rows", "new/rows.csv")
    rows = read_rows(tmp_path / "new" / "rows.csv")
    blocks: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for row in rows[: 4 * 20]:
        blocks[row.cell, row.block].append(row)
    assert Counter(cell for cell, _ in blocks) == {"40tok-low": 10, "60tok-low": 10}
    assert {"".join(row.arm for row in block) for block in blocks.values()} == {"ABBA", "BAAB"}
    assert {row.verdict for row in rows if row.arm == "A" and row.ok} == {"not_checked"}
    assert {row.verdict for row in rows if row.arm == "B" and row.ok} == {"verified"}
    assert {(row.cell, row.block) for row in rows if row.warmup} == {("40tok-low", 0), ("60tok-low", 0)}
    assert [(n, row.status, row.error) for n, row in enumerate(rows, 1) if not row.ok] == [(7, 503, "HTTP 503: full")]
    assert estimate(rows, "40tok-low").blocks == 9
    assert done.returncode == 1, "a request failed, and locust says so"
    for metric in ("TTFT A", "TTFT B", "inter-token A", "total B"):
        assert metric in done.stdout + done.stderr


def test_the_same_prompt_in_every_slot_but_for_its_start(
    pair: Pair, locust: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = locust("--host", pair.url, "--kv-lengths", "40", "--kv-blocks", "2", "--kv-output-tokens", "2")
    assert done.returncode == 0, done.stderr
    prompts = [tuple(body["prompt"]) for body in pair.bodies[:8]]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({prompt[4:] for prompt in prompts[:4]}) == 1
    assert len({prompt[4:] for prompt in prompts}) == 2
    assert len(set(prompts)) == 8
    assert {body["max_tokens"] for body in pair.bodies} == {2}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--kv-lengths", "x"], "invalid literal"),
        (["--kv-lengths", "9000"], "an engine holds 8192"),
        (["--kv-rows", "."], "cannot be made"),
    ],
)
def test_bad_options_end_it(
    locust: Callable[..., subprocess.CompletedProcess[str]], arguments: list[str], why: str
) -> None:
    done = locust("--host", "http://127.0.0.1:9", "--kv-blocks", "1", *arguments)
    assert done.returncode == 1
    assert f"locustfile: {why}" in done.stderr or why in done.stderr
    assert "Traceback" not in done.stderr
