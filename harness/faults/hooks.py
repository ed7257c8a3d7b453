"""Hooks that are lost, doubled or late, and flags that are not what the phase needs."""

from harness.faults.fault import Fault

FAULTS: tuple[Fault, ...] = ()
