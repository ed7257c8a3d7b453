"""Runs of a case's reference that round at random: how far rounding takes it, for `rounding`.

A case that expects `rounding` has `NUM_SAMPLES` such runs, with the seeds 1 to `NUM_SAMPLES`. They
are the reference in all but its taps and stressors, which decide no loss. Cases of one reference
share them, as they share its control.

Six, as the bounds of `harness.checks.within` need: a spread from n runs has n - 1 degrees of
freedom, and what a right program may take of it once in 10^7 times is 280 spreads of four runs, 45
of six and 22 of eight. A run more costs as much as any of them.
"""

import dataclasses

from harness.records import CaseSpec, RunSpec
from harness.tolerance import ROUNDING

NUM_SAMPLES = 6
SLOWDOWN = 10.0
"""About so many times as long a step takes: each operator runs in float64, too, and is rounded."""


def samples_of(case: CaseSpec) -> tuple[RunSpec, ...]:
    """The runs that round at random; none of a case that expects something else."""
    if case.expect != ROUNDING:
        return ()
    spec = case.reference
    config = {k: [] if k in ("taps", "stress") else v for k, v in spec.config.items()}
    return tuple(
        dataclasses.replace(
            spec, config=config, timeout_s=SLOWDOWN * spec.timeout_s,
            stall_s=spec.stall_s and SLOWDOWN * spec.stall_s, rounding=seed,
        )
        for seed in range(1, NUM_SAMPLES + 1)
    )  # fmt: skip


def refusal(config: dict[str, object]) -> tuple[str, str] | None:
    """What keeps a configuration of the built-in trainer from rounding at random: expected, got.

    Graphs replay and compiled code runs kernels that nothing can make round otherwise.
    """
    usual = {"graph": (), "compile": (), "backend": ("torch",), "fp8": ("none",)}
    for key, legal in usual.items():
        value = config.get(key)
        if value not in legal and value:
            return f"a reference with {key} {legal[0] if legal else 'none'}", str(value)
    if config.get("engine") == "megatron_fsdp":
        return "a reference with engine ours, fsdp2 or ddp", "megatron_fsdp"
    return None
