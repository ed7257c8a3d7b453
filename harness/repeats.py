"""All runs of a case: its three, repeats that are timed, samples of rounding, a confirming pair.

A case with `repeats` n has 2 n more runs. They start when every other run of the matrix has ended,
and each has the machine to itself (on Slurm: in an allocation made with `--exclusive`). Cases that
share a reference share its repeats, and take turns with it, so that a drift favours nobody:

    round 0   reference   candidate A   candidate B
    round 1   candidate B   candidate A   reference

A case that expects `rounding` has `NUM_SAMPLES` runs of its reference that round at random; taps,
stressors and resuming, which decide no loss, are left out of them. Six: what a right program may
take of a spread of n runs once in 10^7 times is 280 spreads of four runs, 45 of six and 22 of
eight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.records import CaseSpec, RunResult, RunSpec
from harness.values import ROUNDING

FIRST_REPEAT = 2
"""Replica number of the first repeat, past a run and its control."""
CONFIRMING = -1
"""Replica number of the runs that confirm a difference: it is no timed run's, however many."""
NUM_SAMPLES = 6
_LEFT_OUT: dict[str, object] = {"taps": [], "stress": [], "resume_at": 0}
SLOWDOWN = 10.0
"""About so many times as long a step takes: each operator runs in float64, too, and is rounded."""


def is_timed(spec: RunSpec) -> bool:
    """Whether a run is made for its times, and so alone."""
    return spec.replica >= FIRST_REPEAT


def timed_pairs(case: CaseSpec) -> tuple[tuple[RunSpec, RunSpec], ...]:
    """Repeats of the case's reference and candidate, round by round."""
    numbers = range(FIRST_REPEAT, FIRST_REPEAT + case.repeats)
    return tuple(
        (replace(case.reference, replica=n), replace(case.candidate, replica=n)) for n in numbers
    )


def samples_of(case: CaseSpec) -> tuple[RunSpec, ...]:
    """The runs that round at random; none of a case that expects something else."""
    if case.expect != ROUNDING:
        return ()
    spec = case.reference
    # Copies of a weight drift apart where ranks round at random: they could not be saved.
    config = {k: _LEFT_OUT.get(k, v) for k, v in spec.config.items()}
    stall_s = spec.stall_s and SLOWDOWN * spec.stall_s
    plain = replace(spec, config=config, timeout_s=SLOWDOWN * spec.timeout_s, stall_s=stall_s)
    return tuple(replace(plain, rounding=seed) for seed in range(1, NUM_SAMPLES + 1))


def refusal(config: dict[str, object]) -> tuple[str, str] | None:
    """What keeps a configuration of the built-in trainer from rounding at random: expected, got."""
    # Nothing can make kernels of graphs and compiled code round otherwise.
    usual = {"graph": "none", "compile": "none", "backend": "torch", "fp8": "none"}
    for key, legal in usual.items():
        if (value := config.get(key)) and value != legal:
            return f"a reference with {key} {legal}", str(value)
    if config.get("engine") == "megatron_fsdp":
        return "a reference with engine ours, fsdp2 or ddp", "megatron_fsdp"
    return None


def confirming_runs(case: CaseSpec) -> dict[str, RunSpec]:
    """The repeats, by side, that are made if the case fails; no part of the plan until then."""
    if not case.confirm or case.skip_reason:
        return {}
    sides = {"reference": case.reference, "candidate": case.candidate}
    return {side: replace(spec, replica=CONFIRMING) for side, spec in sides.items()}


def runs_of(case: CaseSpec) -> tuple[RunSpec, ...]:
    """Every run that the case needs."""
    return (*untimed_runs(case), *(spec for pair in timed_pairs(case) for spec in pair))


def untimed_runs(case: CaseSpec) -> tuple[RunSpec, ...]:
    """The three legs, and samples of rounding."""
    return (case.reference, case.control, case.candidate, *samples_of(case))


def past_legs(
    case: CaseSpec, runs: Sequence[RunResult]
) -> tuple[Sequence[RunResult], Sequence[RunResult]]:
    """Samples of rounding and timed repeats among what belongs to `runs_of`."""
    end = len(untimed_runs(case))
    return runs[3:end], runs[end:]


def in_turn(cases: Iterable[CaseSpec]) -> tuple[RunSpec, ...]:
    """The timed runs of cases, each once, in the order in which they are to be made."""
    groups: dict[str, list[CaseSpec]] = {}
    for case in cases:
        if case.repeats and not case.skip_reason:
            groups.setdefault(case.reference.key, []).append(case)
    order: dict[str, RunSpec] = {}
    for group in groups.values():
        for number in range(max(case.repeats for case in group)):
            now = [timed_pairs(case)[number] for case in group if number < case.repeats]
            turn = [now[0][0], *(candidate for _, candidate in now)]
            for spec in reversed(turn) if number % 2 else turn:
                order.setdefault(spec.key, spec)
    return tuple(order.values())


def unique_runs(cases: Iterable[CaseSpec]) -> dict[str, RunSpec]:
    """The runs that `cases` need, by key, in the order in which they are first needed."""
    runs: dict[str, RunSpec] = {}
    for spec in (spec for case in cases if not case.skip_reason for spec in runs_of(case)):
        runs.setdefault(spec.key, spec)
    return runs
