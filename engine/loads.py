"""D's loads in flight, from the step that starts them to their verdict (CON-1, CON-4, VER-7).

A load outlives its request when that is aborted: its blocks are still being written, and must not go back to the
pool before the transport has let go of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.checksum.consumer import ConsumerChecksums
from engine.checksum.records import GroupBlocks
from engine.checksum.verdict import NotCheckedReason, Verdict, VerdictStatus, not_checked
from engine.connectors.base import Carrier, SchedulerConnector
from engine.request import Request, Status
from engine.step import StepDraft


@dataclass(frozen=True, slots=True)
class Load:
    """A load in flight, or one that has just finished or failed."""

    request: Request
    groups: Mapping[int, GroupBlocks]

    @property
    def num_tokens(self) -> int:
        """Tokens of the request, from its first on, that it holds once the load has finished.

        A group of recurrent states counts no tokens; every other one counts the same.
        """
        return max(blocks.num_tokens for blocks in self.groups.values())

    @property
    def abandoned(self) -> bool:
        """Its request has ended: nobody will use what it brings."""
        return self.request.finish_reason is not None


class Loads:
    """The loads of one engine by request id. `checks` is told only of those that are to be compared."""

    def __init__(self, checks: ConsumerChecksums, enabled: bool) -> None:
        self._checks = checks
        self._enabled = enabled
        self._in_flight: dict[str, Load] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._in_flight

    @property
    def num_wanted(self) -> int:
        """Loads whose request still waits for them."""
        return sum(not load.abandoned for load in self._in_flight.values())

    def start(
        self, request: Request, groups: Mapping[int, GroupBlocks], connector: SchedulerConnector, draft: StepDraft
    ) -> None:
        """Start the request's load into these blocks with the step that is being planned."""
        request.load_started = True
        request.status = Status.WAITING_FOR_REMOTE_KVS
        wanted = self._enabled and not request.switches_checksum_off
        carrier = connector.kv_checksum_carrier(request, receiving=True) if wanted else None
        if carrier is None:
            request.verdict = not_checked(NotCheckedReason.NO_CARRIER if wanted else NotCheckedReason.OFF)
        else:
            later = carrier is Carrier.CONNECTOR
            groups = self._checks.start(request, groups, draft.step_id, brought_later=later)
            draft.checksum_loads.add(request.request_id)
        self._in_flight[request.request_id] = Load(request, groups)
        draft.loads.append(connector.plan_load(request, groups))

    def abandon(self, request: Request) -> None:
        """The request ends; if it has a load in flight, that load is not compared any more (CON-2)."""
        if request.request_id in self._in_flight:
            self._checks.drop(request.request_id)
            request.verdict = not_checked(NotCheckedReason.REQUEST_ENDED)

    def fail(self, request_ids: Iterable[str]) -> list[Load]:
        """Loads that the connector reports as failed; they are not compared (CON-4)."""
        failed = self._take(request_ids)
        for load in failed:
            self._checks.drop(load.request.request_id)
            if not load.abandoned:
                load.request.verdict = not_checked(NotCheckedReason.LOAD_FAILED)
        return failed

    def finish(self, request_ids: Iterable[str]) -> list[Load]:
        """Loads that every worker reports as finished, judged unless their request has ended."""
        finished = self._take(request_ids)
        for load in finished:
            # Only what was never to be compared has a verdict before its load has finished.
            if load.request.verdict.status is not VerdictStatus.NOT_CHECKED:
                load.request.verdict = self._checks.judge(load.request.request_id)
        return finished

    def _take(self, request_ids: Iterable[str]) -> list[Load]:
        found = (self._in_flight.pop(request_id, None) for request_id in sorted(request_ids))
        return [load for load in found if load is not None]


def why_unacceptable(verdict: Verdict) -> str:
    """What a request that fails for this verdict is told."""
    if verdict.status is VerdictStatus.MISMATCH:
        where = "; ".join(f"group {g.group_id} blocks {list(g.differing)}" for g in verdict.groups if g.differing)
        return f"checksum mismatch in {where}"
    return f"checksums unverified ({verdict.reason})"
