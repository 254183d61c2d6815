"""One mutant, tried: its killers must notice it, its control must not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.mutants.base import Mutant, Probe, applied, probe_name
from harness.mutants.bench import TARGET, Bench, MutantError
from scenarios.words import Result, Role

AS_EXPECTED = (Result.PASS, Result.KNOWN_GAP)


class State(StrEnum):
    """What became of a mutant. Only `killed` is good; `never_reached` does not even say that nobody would notice."""

    KILLED = "killed"
    SURVIVED = "survived"
    CONTROL_NOTICED = "control_noticed"
    NEVER_REACHED = "never_reached"


@dataclass(frozen=True, slots=True)
class Noticed:
    """A killer that noticed a mutant, and how."""

    killer: str
    how: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one mutant. `calls` counts calls of its replacement; `idle` are killers that noticed nothing."""

    mutant: str
    area: str
    what: str
    state: State
    killed_by: tuple[Noticed, ...]
    idle: tuple[str, ...]
    control: str
    control_noticed: str | None
    calls: int
    seconds: float


def try_mutant(mutant: Mutant, seed: int = 0) -> Trial:
    """Put one mutant in, and see who notices.

    Raises:
        MutantError: it cannot be put in.
    """
    started = time.perf_counter()
    bench = Bench(seed)
    with applied(mutant) as calls:
        found = {probe_name(killer): notice(bench, killer) for killer in mutant.killers}
        reached = calls.count
        control_noticed = notice(bench, mutant.control)
    killed_by = tuple(Noticed(killer, how) for killer, how in found.items() if how is not None)
    return Trial(
        mutant=mutant.name,
        area=mutant.area,
        what=mutant.what,
        state=_state(reached, bool(killed_by), control_noticed),
        killed_by=killed_by,
        idle=tuple(killer for killer, how in found.items() if how is None),
        control=probe_name(mutant.control),
        control_noticed=control_noticed,
        calls=reached,
        seconds=round(time.perf_counter() - started, 3),
    )


def _state(reached: int, killed: bool, control_noticed: str | None) -> State:
    if not reached:
        return State.NEVER_REACHED
    if not killed:
        return State.SURVIVED
    return State.KILLED if control_noticed is None else State.CONTROL_NOTICED


def notice(bench: Bench, probe: Probe) -> str | None:
    """What a killer or a control notices; None if all is as it should be.

    A judge or a report that raises has been noticed: nobody would take that for a pass.
    """
    try:
        return _notice_cells(bench, probe) if isinstance(probe, str) else probe(bench)
    except (MutantError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        return f"raised {type(error).__name__}: {error}"


def unique_probes(mutants: Sequence[Mutant]) -> dict[str, Probe]:
    """The killers and controls of these mutants by name, each once."""
    return {probe_name(probe): probe for mutant in mutants for probe in (*mutant.killers, mutant.control)}


def _notice_cells(bench: Bench, name: str) -> str | None:
    plan = [cell for cell in bench.plan(name) if cell.role is not Role.TWIN and not cell.missing]
    if not plan:
        raise MutantError(f"{name} does not apply to target {TARGET}: it can notice nothing")
    run = bench.run_plan(plan)
    bad = [cell for cell in run.cells if cell.result not in AS_EXPECTED]
    if bad:
        first = bad[0]
        why = first.why[0] if first.why else "no reason is given"
        return f"{len(bad)} of {len(plan)} cells; {first.id} is {first.result}: {why}"
    return f"the run counts as interrupted: {len(run.cells)} of {len(plan)} cells" if run.interrupted else None
