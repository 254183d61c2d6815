"""One line of a history in words. `reports.timeline` puts the lines in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.text import clip, counted, ranges

Line = Mapping[str, Any]
Sent = Mapping[str, str | None]

SIDES = {"producer": "P", "consumer": "D"}
MAX_CHARACTERS = 300

# The bytes oracle's moments: the seam where it looks, the view that it is compared with, and what a difference means.
AT_SEAM = {
    "checksummed": ("producer.checksummed", "kv_final", "P summed other bytes than it held when its KV was final"),
    "load_finished": ("consumer.load_finished", "kv_final", "other bytes arrived than P held"),
    "first_use": ("consumer.first_use", "to_be_read", "D reads other bytes than P held"),
}


@dataclass(frozen=True, slots=True)
class Told:
    """Where something happened (producer, consumer, proxy, transfer, fault or run), and what."""

    where: str
    what: str


def positions(found: Sequence[int]) -> str:
    """`block position 7`, `block positions 6-12`."""
    return f"block position{'' if len(found) == 1 else 's'} {ranges(found)}"


def tell(line: Line, sent: Sent) -> Told | None:
    """What a line says, or None if it is not for a reader. `sent` is what P sent as kv_checksums, by request."""
    teller = _TELLERS.get(line["event"])
    try:
        told = teller(line, sent) if teller else None
    except (KeyError, TypeError, ValueError, AttributeError):
        # Of another version: that it happened is still worth telling.
        told = Told("run", f"{line['event']}, in a form that this version does not know")
    return None if told is None else Told(told.where, clip(told.what, MAX_CHARACTERS))


def _engine(line: Line) -> str:
    """The engine of a line, if it is one of the two sides."""
    engine = str(line.get("engine"))
    return engine if engine in SIDES else "run"


def _side(line: Line) -> str:
    return SIDES.get(str(line.get("engine")), "an engine")


def _size(line: Line) -> str:
    """`13 blocks`, and per group where there are several."""
    groups = [(group.get("group", 0), len(group["blocks"])) for group in line.get("groups", ())]
    if len(groups) == 1:
        return counted(groups[0][1], "block")
    return ", ".join(f"{counted(count, 'block')} of group {group}" for group, count in groups) or "no block"


def _kv_final(line: Line, _: Sent) -> Told:
    tokens = max((group["tokens"] for group in line.get("groups", ())), default=0)
    return Told("producer", f"P has computed the prompt, {counted(tokens, 'token')}: its KV is final in {_size(line)}")


def _checksummed(line: Line, _: Sent) -> Told:
    return Told("producer", f"P checksummed {_size(line)}")


def _params_leave(line: Line, _: Sent) -> Told:
    with_or_without = "with" if line.get("kv_checksums") is not None else "without"
    return Told("producer", f"P answered the proxy, {with_or_without} kv_checksums")


def _params_pass(line: Line, sent: Sent) -> Told:
    passed, left = line.get("kv_checksums"), sent.get(line["request"])
    if passed == left:
        what = ", without kv_checksums" if passed is None else ", with kv_checksums as P sent them"
    elif passed is None:
        what = " without the kv_checksums that P sent"
    else:
        what = " with other kv_checksums than P sent"
    return Told("proxy", f"the proxy forwarded the parameters{what}")


def _load_scheduled(line: Line, _: Sent) -> Told:
    starts = sorted({group["start"] for group in line.get("groups", ()) if group.get("start")})
    after = f", from block position {ranges(starts)}" if starts else ""
    return Told("consumer", f"D scheduled the load of {_size(line)}{after}")


def _landed(line: Line, _: Sent) -> Told:
    return Told("transfer", f"copy {line['index'] + 1} of {line['of']} landed")


def _completion(line: Line, _: Sent) -> Told:
    side = "P" if line.get("to") == "producer" else "D"
    return Told("transfer", f"{side} was told that the transfer is done")


def _load_finished(line: Line, _: Sent) -> Told:
    return Told("consumer", f"D's worker took the load as finished: {_size(line)}")


def _verified(line: Line, _: Sent) -> Told:
    verdict = line["verdict"]
    reason = f" ({verdict['reason']})" if verdict.get("reason") else ""
    groups = verdict.get("groups", [])
    parts = [_compared(group, named=len(groups) > 1) for group in groups]
    return Told("consumer", f"verdict {verdict['status']}{reason}" + (f": {'; '.join(parts)}" if parts else ""))


def _compared(group: Mapping[str, Any], *, named: bool) -> str:
    """What was compared in a group, and what of it differs."""
    parts = []
    if group["differing"]:
        parts.append(f"{positions(group['differing'])} {'differs' if len(group['differing']) == 1 else 'differ'}")
    parts.append(f"{counted(len(group['compared']), 'block')} compared" if group["compared"] else "nothing compared")
    if group["compared"] and group["not_compared"]:
        parts.append(f"{len(group['not_compared'])} not")
    return (f"group {group['group']}: " if named else "") + ", ".join(parts)


def _first_use(line: Line, _: Sent) -> Told:
    return Told("consumer", "D reads the loaded KV for the first time")


def _recompute(line: Line, _: Sent) -> Told:
    return Told("consumer", "D gave up the load and computes the prompt itself")


def _preempted(line: Line, _: Sent) -> Told:
    return Told(_engine(line), f"{_side(line)} preempted the request")


def _ended(line: Line, _: Sent) -> Told:
    return Told(_engine(line), f"{_side(line)} ended the request ({line.get('reason')})")


def _answer(line: Line, _: Sent) -> Told:
    tokens = counted(len(line["tokens"]), "token")
    reason, error = line.get("finish_reason"), line.get("error")
    if reason in ("stop", "length"):
        how = ", all computed by itself" if line.get("recomputed") else ""
        return Told(_engine(line), f"{_side(line)} answered: {tokens}{how}")
    ended = "failed" if reason == "error" else "aborted" if reason == "abort" else f"ended ({reason})"
    after = f" after {tokens}" if line["tokens"] else ""
    return Told(_engine(line), f"the request {ended}{after}" + (f": {error}" if error else ""))


def _refused(line: Line, _: Sent) -> Told:
    return Told("run", f"an engine refused to start: {line['error']}")


def _crashed(line: Line, _: Sent) -> Told:
    return Told("run", f"an engine crashed: {line['error']}")


def _checker(line: Line, _: Sent) -> Told:
    return Told("run", f"a checker crashed: {line['error']}")


def _pool(line: Line, _: Sent) -> Told | None:
    lost = line["total"] - line["free"]
    if not lost:
        return None
    what = f"{lost} of {line['total']} blocks of {_side(line)} never came back"
    if lost < 0:
        what = f"{-lost} more blocks came back to {_side(line)} than it has"
    return Told(_engine(line), f"bookkeeping oracle: {what}")


def _no_evidence(line: Line, _: Sent) -> Told | None:
    return None if line["evidence"] else Told("fault", f"{line['fault']}: left no evidence that it happened")


def _end(line: Line, _: Sent) -> Told | None:
    if line.get("finished") is not False:
        return None
    held = "; ".join(line.get("held", ())) or "nothing was held"
    return Told("run", f"the deadline passed with work left ({held})")


_TELLERS: dict[str, Callable[[Line, Sent], Told | None]] = {
    "producer.kv_final": _kv_final,
    "producer.checksummed": _checksummed,
    "producer.params_leave": _params_leave,
    "proxy.params_pass": _params_pass,
    "consumer.load_scheduled": _load_scheduled,
    "transfer.op_landed": _landed,
    "transfer.completion": _completion,
    "consumer.load_finished": _load_finished,
    "consumer.verified": _verified,
    "consumer.first_use": _first_use,
    "consumer.recompute_start": _recompute,
    "request.preempted": _preempted,
    "request.ended": _ended,
    "answer": _answer,
    "engine.refused": _refused,
    "engine.crashed": _crashed,
    "checker.crashed": _checker,
    "oracle.pool": _pool,
    "fault.done": _no_evidence,
    "end": _end,
}
