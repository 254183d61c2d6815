"""The P/D proxy: a prompt goes to P for its prefill, then to D with the parameters that P answered.

For a push it goes to both at once, since P has to know where D wants the KV: D's parameters are then the proxy's own.

Keys that the proxy does not know are forwarded as they are (WIR-3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.connectors.push import push_params
from engine.core import EngineCore
from engine.errors import RequestError
from engine.request import FinishReason, Request, RequestOutput, Status
from engine.seams import Hold, ParamsPass, Seams


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a client asks for. `kv_checksum` as in a request."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    kv_checksum: bool | None = None


@dataclass(slots=True, eq=False)
class _Handover:
    prompt: Prompt
    params: Mapping[str, Any]
    holds: tuple[Hold, ...] = ()


@dataclass(slots=True, eq=False)
class Proxy:
    """Routes between one producer and one consumer. The owner of the run calls `forward`. `push`: see the module.

    With `bidirectional` D is told that somebody will read the request from it as well, as P was.
    """

    producer: EngineCore
    consumer: EngineCore
    seams: Seams
    push: bool = False
    bidirectional: bool = False
    _prompts: dict[str, Prompt] = field(default_factory=dict)
    _handovers: dict[str, _Handover] = field(default_factory=dict)

    def submit(self, prompt: Prompt) -> None:
        """Start a prompt: one token on P, whose KV a consumer will read.

        Raises:
            RequestError: P cannot take it; nothing of it is kept.
        """
        if prompt.request_id in self._handovers:
            raise RequestError(f"request {prompt.request_id}: the id is in use: wait for its end or take another id")
        params = {"do_remote_decode": True}
        self.producer.add_request(Request(prompt.request_id, list(prompt.token_ids), 1, params, prompt.kv_checksum))
        self._prompts[prompt.request_id] = prompt
        if self.push:
            pushed = push_params(self.producer.config.engine_id, prompt.request_id)
            self._handovers[prompt.request_id] = _Handover(prompt, pushed)

    def prefilled(self, output: RequestOutput) -> RequestOutput | None:
        """Take P's answer to a prompt. Returns it if it is the client's answer: P failed."""
        prompt = self._prompts.pop(output.request_id)
        if not output.finish_reason.normal:
            if self.push and self._handovers.pop(prompt.request_id, None) is None:
                # D knows the request already, and answers for both.
                self.consumer.abort(prompt.request_id, FinishReason.ERROR, f"the producer failed: {output.error}")
                return None
            return output
        if self.push:
            return None
        self._handovers[prompt.request_id] = _Handover(prompt, output.kv_transfer_params or {})
        return None

    def ready(self) -> list[str]:
        """Prefilled requests that can go on to D now, by id."""
        return [request_id for request_id, h in self._handovers.items() if all(hold.until() for hold in h.holds)]

    def forward(self, request_id: str) -> RequestOutput | None:
        """Send a prefilled request to D, unless the seam holds it; it is offered there again once it is released.

        Returns the client's answer if D refuses the request: what arrived is not usable.
        """
        handover = self._handovers[request_id]
        outcome = self.seams.emit(ParamsPass(request_id, handover.params))
        if outcome.holds:
            handover.holds = outcome.holds
            return None
        del self._handovers[request_id]
        prompt = handover.prompt
        params = dict(outcome.event.params) | ({"do_remote_decode": True} if self.bidirectional else {})
        request = Request(request_id, list(prompt.token_ids), prompt.max_tokens, params, prompt.kv_checksum)
        try:
            self.consumer.add_request(request)
        except RequestError as error:
            request.finish_reason, request.error, request.status = FinishReason.ERROR, str(error), Status.FINISHED
            return RequestOutput.of(request)
        return None

    @property
    def num_pending(self) -> int:
        return len(self._prompts) + len(self._handovers)
