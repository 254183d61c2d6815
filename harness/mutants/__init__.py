"""Planted bugs of everything that a run trusts: the engine, the faults, the judge and the reports."""

from harness.mutants import checksum, engine, hardened, injector, judge, policy, reporter, topology, verifier
from harness.mutants.base import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *engine.MUTANTS,
    *checksum.MUTANTS,
    *hardened.MUTANTS,
    *verifier.MUTANTS,
    *topology.MUTANTS,
    *policy.MUTANTS,
    *injector.MUTANTS,
    *judge.MUTANTS,
    *reporter.MUTANTS,
)
