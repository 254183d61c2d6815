"""What is said between kvchaos and the process of one role: one JSON object a line, both ways.

kvchaos writes commands to the process's standard input, `{"id": 7, "command": "generate", ...}`. On a file descriptor
of its own, since vLLM prints to standard output, the process answers `{"id": 7, "result": ...}` or `{"id": 7, "error":
"..."}`. Before an answer it may tell of moments, `{"event": "consumer.load_finished", ...}`, and wait, `{"wait": "r2",
"why": "..."}`, until kvchaos writes `{"go": true}`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import IO, Any

logger = logging.getLogger(__name__)
Message = Mapping[str, Any]


class CommandError(ValueError):
    """A command that cannot be done: the message says why. The process goes on."""


class Channel:
    """Lines in, lines out."""

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        self._commands = commands
        self._answers = answers

    def receive(self) -> Message | None:
        """The next message, or None when the other side has gone.

        Raises:
            CommandError: a line is no JSON object.
        """
        line = self._commands.readline()
        if not line:
            return None
        try:
            message = json.loads(line)
        except ValueError as error:
            raise CommandError(f"not JSON: {error}") from None
        if not isinstance(message, dict):
            raise CommandError(f"not a JSON object: {line[:60]!r}")
        return message

    def send(self, message: Message) -> None:
        self._answers.write(json.dumps(message, separators=(",", ":")) + "\n")
        self._answers.flush()

    def wait(self, request: str, why: str) -> None:
        """Say that a request waits, and return when the other side lets it go on.

        Raises:
            CommandError: it says something else, or has gone.
        """
        self.send({"wait": request, "why": why})
        answer = self.receive()
        if answer is None or answer.get("go") is not True:
            raise CommandError(f"{request} waited for a go, and got {answer}")


def serve(channel: Channel, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Do what is commanded until a command `stop`, or until the other side has gone.

    What a command raises is answered as its error: whoever commanded decides what becomes of this process.
    """
    while (message := channel.receive()) is not None:
        number, name = message.get("id"), str(message.get("command"))
        if name == "stop":
            channel.send({"id": number, "result": None})
            return
        arguments = {key: value for key, value in message.items() if key not in ("id", "command")}
        try:
            if name not in commands:
                raise CommandError(f"there is no command {name!r}: there are {', '.join(commands)}, stop")
            channel.send({"id": number, "result": commands[name](**arguments)})
        except Exception as error:
            logger.exception("command %s failed", name)
            channel.send({"id": number, "error": f"{type(error).__name__}: {error}"})
