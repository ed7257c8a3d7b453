"""Tokens, masks and random numbers that are not those that were asked for."""

from harness.faults.fault import Fault

FAULTS: tuple[Fault, ...] = ()
