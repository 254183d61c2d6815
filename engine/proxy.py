"""The P/D proxy: a prompt goes to P for its prefill, then to D with the parameters that P answered.

Keys that the proxy does not know are forwarded as they are (WIR-3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.request import Request, RequestOutput
from engine.seams import Hold, ParamsPass, Seams


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a client asks for."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Handover:
    request: Request
    holds: tuple[Hold, ...]


@dataclass(slots=True, eq=False)
class Proxy:
    """Routes between one producer and one consumer. The owner of the run calls `forward`."""

    producer: EngineCore
    consumer: EngineCore
    seams: Seams
    _prompts: dict[str, Prompt] = field(default_factory=dict)
    _handovers: list[_Handover] = field(default_factory=list)

    def submit(self, prompt: Prompt) -> None:
        """Start a prompt: one token on P, whose KV a consumer will read."""
        self._prompts[prompt.request_id] = prompt
        params = {"do_remote_decode": True}
        self.producer.add_request(Request(prompt.request_id, list(prompt.token_ids), 1, params))

    def prefilled(self, output: RequestOutput) -> RequestOutput | None:
        """Take P's answer to a prompt. Returns it if it is the client's answer: P failed."""
        prompt = self._prompts.pop(output.request_id)
        if not output.finish_reason.normal:
            return output
        outcome = self.seams.emit(ParamsPass(prompt.request_id, output.kv_transfer_params or {}))
        request = Request(
            prompt.request_id, list(prompt.token_ids), prompt.max_tokens, kv_transfer_params=dict(outcome.event.params)
        )
        self._handovers.append(_Handover(request, outcome.holds))
        return None

    def ready(self) -> list[Request]:
        """Requests that can go on to D now."""
        return [h.request for h in self._handovers if all(hold.until() for hold in h.holds)]

    def forward(self, request: Request) -> None:
        """Send a prefilled request to D."""
        self._handovers = [h for h in self._handovers if h.request is not request]
        self.consumer.add_request(request)

    @property
    def num_pending(self) -> int:
        return len(self._prompts) + len(self._handovers)
