"""The process of one role, as this side sees it: commands go in, what happens meanwhile and the result come out.

The other end, and what is said, is `kvchaos_vllm_faults.protocol`. That package is not imported here: it lives in
vLLM's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import KVChaosError

TOKEN_VARIABLE = "KVCHAOS_VLLM_FAULT_TOKEN"
_CHUNK = 1 << 20
_ERROR = re.compile(r"\w(Error|Exception|Interrupt)\b")
# vLLM's lines begin with process id and time, which a history must not hold.
_WHEN_AND_WHO = re.compile(r"\(\w+ pid=\d+\) |\b\d\d-\d\d \d\d:\d\d:\d\d ")
_STOP_S = 15.0

Message = Mapping[str, Any]
OnEvent = Callable[[Message], None]
OnWait = Callable[[str, str], None]


class RoleError(KVChaosError):
    """The process could not do what it was told, and goes on."""


class RoleGoneError(KVChaosError):
    """The process has ended, or says nothing any more."""


class RoleProcess:
    """One process from construction to `stop`. `log` is where its output goes."""

    def __init__(self, role: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`command` gets `--answers FD` appended. Does not wait until the engine is up: that is `ready`."""
        self.role = role
        self._log = log
        self._buffer = b""
        self._number = 0
        self._answers, theirs = os.pipe()
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [*command, "--answers", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    pass_fds=(theirs,),
                    # Ctrl-C is for this process to understand. When it ends, however it does, the other finds its
                    # standard input closed and ends as well.
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, timeout_s: float) -> Message:
        """Wait until the engine is up. Returns what it says of itself. Raises RoleGoneError."""
        found: Message = self._receive(time.monotonic() + timeout_s)["ready"]
        return found

    def call(
        self,
        name: str,
        *,
        timeout_s: float,
        on_event: OnEvent = lambda event: None,
        on_wait: OnWait | None = None,
        **arguments: Any,
    ) -> Any:
        """Run a command and return its result. `on_wait` is called, before it may go on, where a request waits.

        Raises:
            RoleError: it failed there.
            RoleGoneError: the process has ended, or says nothing for `timeout_s`.
        """
        self._number += 1
        self._send({"id": self._number, "command": name, **arguments})
        while True:
            message = self._receive(time.monotonic() + timeout_s)
            if "event" in message:
                on_event(message)
            elif "wait" in message:
                if on_wait is None:
                    self._process.kill()  # it would wait for ever
                    raise RoleGoneError(
                        f"{self.role}: {message['wait']} waits ({message['why']}), and nobody expected that"
                    )
                on_wait(str(message["wait"]), str(message["why"]))
                self._send({"go": True})
            elif message.get("id") == self._number:
                if "error" in message:
                    raise RoleError(f"{self.role}: {name}: {message['error']}")
                return message["result"]
            else:
                raise RoleGoneError(f"{self.role} says something unknown: {str(message)[:100]}")

    def stop(self) -> None:
        """End the process, kindly at first."""
        with contextlib.suppress(RoleGoneError):
            self._send({"id": 0, "command": "stop"})
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended with something unread
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _send(self, message: Message) -> None:
        try:
            if self._process.stdin is None:
                raise OSError("no standard input")
            self._process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise RoleGoneError(self._last_words()) from None

    def _receive(self, deadline: float) -> Message:
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise RoleGoneError(f"{self.role} says nothing: {self._last_words()}")
            chunk = os.read(self._answers, _CHUNK)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_S)  # it is ending, and says why meanwhile
                raise RoleGoneError(self._last_words())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise RoleGoneError(f"{self.role} says something unknown: {line[:100]!r}")
        return message

    def _last_words(self) -> str:
        code = self._process.poll()
        state = "runs" if code is None else f"ended with {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if _ERROR.search(line)]
        said = (errors or lines or ["it said nothing"])[-1]
        return f"the process of the {self.role} {state}: {_WHEN_AND_WHO.sub('', said)[:300]}"
