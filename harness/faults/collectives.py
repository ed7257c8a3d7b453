"""Collectives that are lost, doubled, of the wrong group, or in another order."""

from harness.faults.fault import Fault

FAULTS: tuple[Fault, ...] = ()
