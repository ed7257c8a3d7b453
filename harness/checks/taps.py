"""Digests of what went through modules: inputs, outputs, gradients, call by call, on every rank.

The first difference is the first in program order (`calls`), which is where a fault entered. A
gradient is that of a module's output, so what differs first was computed by what comes after it.

A module that a graph scope takes apart, as the router's does experts, is called in one leg only:
that is counted and said, not failed. Any other that ran in one leg only, or less often, differs. If
all that a pattern means was taken apart, never runs or is no module at all, the pattern looked at
nothing, which is an error. The last step decides: the first ones are eager in every leg. Patterns
are those of the specification and those that a script gave its recorder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_core.config import ConfigError, TapPattern, tap_pattern
from harness.checks.answer import error, failed, passed, refuse_parameters
from harness.checks.calls import GRADIENT, Both, calls, in_program_order, shared_rows
from harness.checks.evidence import count, rank_table, shared_pairs, show_ranks, step_table
from harness.records import (
    CheckResult,
    Difference,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
)

NAME = "taps"
MISSING = "never ran"
_WITHOUT_CALLS = (
    "the tap {} compares nothing: it matches no module that either run called in training"
)


@dataclass(frozen=True)
class _Compared:
    """What one step of one rank showed; `rows` only if any of them differs."""

    rows: list[Both]
    equal: int
    unseen: frozenset[str]


def check(
    reference: RunResult, candidate: RunResult, parameters: Mapping[str, object]
) -> CheckResult:
    """Compare every call of the (step, rank) pairs that both runs hold."""
    if (refusal := refuse_parameters(NAME, parameters)) is not None:
        return refusal
    starts = {r: records.start for r, records in rank_table(reference).items() if records.start}
    others = {r: records.start for r, records in rank_table(candidate).items() if records.start}
    for rank, start in starts.items():
        if rank in others and others[rank].taps != start.taps:
            return error(NAME, "unsupported", f"the legs tap different modules on rank {rank}")
    if not any(start.taps for start in starts.values()):
        return _no_taps(_patterns(reference, candidate))
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = [key for key in shared_pairs(ours, theirs) if key[1] in starts]
    specs = (reference.spec, candidate.spec)
    seen = {key: _compare(ours[key], theirs[key], starts[key[1]], specs) for key in pairs}
    unseen = sorted({tap for each in seen.values() for tap in each.unseen})
    apart = ""
    if unseen:
        apart = f"; {count(len(unseen), 'tap')} ran in one leg only, {unseen[0]} first by name"
    bad = {key: each for key, each in seen.items() if each.rows}
    equal = sum(each.equal for each in seen.values())
    if bad:
        return _failure(bad, apart, len(pairs))
    blind: str | None = f"no tapped module ran in both legs: nothing to compare{apart}"
    if equal:
        last = max(step for step, _ in pairs)
        blind = _blind(specs, _patterns(reference, candidate), {
            rank: (ours[last, rank], theirs[last, rank], starts[rank])
            for step, rank in pairs if step == last
        })  # fmt: skip
    if blind is not None:
        return error(NAME, "not_run", blind)
    message = f"{count(equal, 'call')} equal in {count(len(pairs), '(step, rank) pair')}{apart}"
    return passed(NAME, message, calls=equal, unseen=len(unseen))


def _no_taps(patterns: Sequence[str]) -> CheckResult:
    if patterns:
        return error(NAME, "not_run", _WITHOUT_CALLS.format(patterns[0]))
    return error(NAME, "unsupported", "the run taps no module: say which with taps: [...]")


def _patterns(*runs: RunResult) -> list[str]:
    """What the runs tap, by specification or by the script's own line."""
    found = [text for run in runs for text in run.spec.config.get("taps", ())]
    for event in (event for run in runs for records in run.ranks for event in records.events):
        given = event.detail.get("patterns") if event.name == NAME else None
        found += given if isinstance(given, list) else ()
    return list(dict.fromkeys(map(str, found)))


def _blind(
    specs: tuple[RunSpec, RunSpec],
    patterns: Sequence[str],
    at_last: Mapping[int, tuple[StepRecord, StepRecord, StartRecord]],
) -> str | None:
    """What to say of the first pattern that compares nothing in the last step; None if all do."""
    ran: dict[str, list[bool]] = {}
    for *records, start in at_last.values():
        both = (calls(record, start, spec) for record, spec in zip(records, specs, strict=True))
        for a, b in zip(*both, strict=True):
            sides = ran.setdefault(a.tap, [False, False])
            ran[a.tap] = [sides[0] or bool(a.place), sides[1] or bool(b.place)]
    for text in patterns:
        try:
            pattern = tap_pattern(text)
        except ConfigError:
            continue  # of a damaged record, which is a problem of its own
        meant = {tap: sides for tap, sides in ran.items() if _means(pattern, tap)}
        if not meant:
            return _WITHOUT_CALLS.format(text)
        if not any(all(sides) for sides in meant.values()):
            first, (in_ours, in_theirs) = min(meant.items())
            where = "in neither leg"
            if in_ours != in_theirs:
                where = (
                    f"in the {'reference' if in_ours else 'candidate'} alone, as graphs of the "
                    "other replay parts of it: tap what is inside, or the whole layer"
                )
            step = next(iter(at_last.values()))[0].step
            return f"the tap {text} compares nothing: at step {step} {first} ran {where}"
    return None


def _means(pattern: TapPattern, tap: str) -> bool:
    module, _, kind = tap.partition(":")
    return kind == pattern.kind and pattern.matches(module)


def _failure(bad: dict[tuple[int, int], _Compared], apart: str, num_pairs: int) -> CheckResult:
    step = min(bad)[0]
    here = in_program_order(
        [row for (at, _), each in bad.items() if at == step for row in each.rows]
    )
    different = [row for row in here if row.differs]
    first = different[0]
    call, rank = first.call, first.rank
    ranks = {row.rank for row in different}
    what = f"the gradient of the output of {call.module}" if call.kind == GRADIENT else call.tap
    shown = [c.digest if c.place else MISSING for c in (first.reference, first.candidate)]
    return failed(
        NAME,
        "diverged",
        f"{what}, call {call.number}, differs first in program order, at step {step} on rank "
        f"{rank}: digest {shown[0]} became {shown[1]}; in that step "
        f"{count(len(different), 'call')} on {show_ranks(ranks)} "
        f"{'differs' if len(different) == 1 else 'differ'}, in all {len(bad)} of "
        f"{count(num_pairs, '(step, rank) pair')}{apart}",
        Difference(
            step=step, rank=rank, quantity=f"taps.{call.kind}", tensor=call.name,
            reference=shown[0], candidate=shown[1],
        ),
        differing_calls=len(different),
        differing_pairs=len(bad),
    )  # fmt: skip


def _compare(
    ours: StepRecord, theirs: StepRecord, start: StartRecord, specs: tuple[RunSpec, RunSpec]
) -> _Compared:
    rows, unseen = shared_rows(ours, theirs, start, specs)
    ran = [row for row in rows if row.reference.place]
    equal = sum(not row.differs for row in ran)
    return _Compared(rows if any(row.differs for row in rows) else [], equal, unseen)
