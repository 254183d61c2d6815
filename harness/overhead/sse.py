"""What an OpenAI-compatible server streams, as far as a load test has to know: when tokens came, and what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass(slots=True)
class Reading:
    """One streamed completion, line by line. `first_s` and `last_s`: when the first and the last token came."""

    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    error: str = ""
    verdict: str = ""
    done: bool = field(default=False)

    def line(self, text: str, now: float) -> None:
        """Take in one line of the stream, which arrived at `now` (seconds). Comments and blank lines say nothing."""
        name, _, value = text.partition(":")
        if name != "data":
            return
        value = value.strip()
        if value == DONE:
            self.done = True
            return
        try:
            event = json.loads(value)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.error = self.error or f"an event is no JSON object: {one_line(value)}"
            return
        self._event(event, now)

    def _event(self, event: dict[str, Any], now: float) -> None:
        count = _tokens_in(event)
        if count:
            self.first_s = now if self.first_s is None else self.first_s
            self.last_s = now
            self.tokens += count
        load = event.get("kv_load")
        if isinstance(load, dict):
            self.verdict = one_line(str(load.get("verdict", "")))
        if event.get("error") is not None:
            self.error = self.error or error_of(event)

    def end(self) -> str:
        """What is wrong with the whole answer; empty if nothing."""
        if self.error:
            return self.error
        if not self.tokens:
            return "the stream ended without a token"
        return "" if self.done else f"the stream broke off after {self.tokens} tokens"

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens; None with fewer than two."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


def error_of(body: Any) -> str:
    """The message of an error in OpenAI's form, or of whatever else it is."""
    error = body.get("error") if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return one_line(str(message))


def one_line(text: str) -> str:
    """At most 200 characters, without line breaks, and such as a file can hold (JSON may name half a character)."""
    return " ".join(text.split())[:200].encode(errors="backslashreplace").decode()


def _tokens_in(event: dict[str, Any]) -> int:
    """Tokens of an event: as it lists them, else one for each that has a choice with text."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return 0
    ids = choices[0].get("token_ids")
    if isinstance(ids, list):
        return len(ids)
    return 1 if choices[0].get("text") else 0
