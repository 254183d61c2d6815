"""Copy operations of one load that read from elsewhere on P: what a wrong address does. Shared by several kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.checksum.records import GroupBlocks
from engine.seams import Change, Groups, KVFinal, LoadFinished, LoadScheduled, OpPosted, Seams
from faults.delivery import Delivery

Source = Callable[[OpPosted], tuple[int, int] | None]
"""The block and slot of P that an operation reads instead; None: those it was to read."""

Choose = Callable[[GroupBlocks, GroupBlocks], Source]
"""Given D's blocks of the load and P's blocks of the owner, what each operation reads instead."""

Record = Callable[[str, str, str | None, str | None], None]

FINISHED = "consumer.load_finished"


class Redirect:
    """Redirects the load of `request_id`. `owner` is the request whose blocks on P `choose` is given."""

    needs = frozenset({"producer.kv_final", "consumer.load_scheduled", "transfer.op_posted", FINISHED})

    def __init__(self, request_id: str, owner: str, choose: Choose, record: Record) -> None:
        self._request_id = request_id
        self._owner = owner
        self._choose = choose
        self._record = record
        self._tables: Groups = {}
        self._loading: Groups = {}
        self._sources: dict[int, Source] = {}
        self._delivery = Delivery()
        self._from: dict[tuple[int, int], list[int]] = {}

    def attach(self, seams: Seams) -> None:
        seams.on("producer.kv_final", self._remember)
        seams.on("consumer.load_scheduled", self._scheduled)
        seams.on("transfer.op_posted", self._posted)
        seams.on(FINISHED, self._prove)

    def owner_is_final(self) -> bool:
        """Whether P has written all KV of the owner."""
        return bool(self._tables)

    def _remember(self, event: KVFinal) -> None:
        if event.request_id == self._owner:
            self._tables = event.groups

    def _scheduled(self, event: LoadScheduled) -> None:
        if event.request_id == self._request_id:
            self._loading = event.groups

    def _posted(self, event: OpPosted) -> Change[OpPosted] | None:
        op = event.op
        if event.request_id != self._request_id or not {op.group} <= self._loading.keys() & self._tables.keys():
            return None
        if not self._sources:
            # Not sooner: in a push D schedules the load before P's KV is final.
            both = (group_id for group_id in self._tables if group_id in self._loading)
            self._sources = {g: self._choose(self._loading[g], self._tables[g]) for g in both}
        self._delivery.plan(event)
        place = self._sources[op.group](event)
        if place is None or place == (op.source_block, op.source_slot):
            return None
        sources = self._from.setdefault((op.group, op.position), [])
        if place[0] not in sources:
            sources.append(place[0])
        return Change(replace(event, op=replace(op, source_block=place[0], source_slot=place[1])))

    def _prove(self, event: LoadFinished) -> None:
        if event.request_id != self._request_id:
            return
        for block in self._delivery.changed(event.groups, event.memory):
            if sources := self._from.get((block.group, block.position)):
                listed = ", ".join(map(str, sources))
                what = f"D's block {block.block_id} (block position {block.position}) was read from P's block {listed}"
                self._record(FINISHED, what, block.before, block.after)
