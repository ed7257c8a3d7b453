"""Digests of what went through modules: inputs, outputs, gradients, call by call, on every rank.

The first difference is the first in program order, which is where a fault entered: the lowest step;
in it forward passes, then backward passes; then microbatches in order; then stages of the pipeline
as data flows through them; then the place that the reference gave the call; then the rank. A
gradient is that of a module's output, so what differs first was computed by what comes after it.

A module that was called in one leg and not at all in the other was taken apart by a graph scope, as
experts are: that is counted and said, not failed. One that was called less often is a failure. If
all that a pattern means was taken apart, or never runs, the pattern looked at nothing, which is an
error. The last step decides: the first ones are eager in every leg.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_core.config import TapPattern, tap_pattern
from harness.checks.answer import error, failed, passed, refuse_parameters
from harness.checks.steps import count, rank_table, shared_pairs, show_ranks, step_table
from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    CheckResult,
    Difference,
    RunResult,
    StartRecord,
    StepRecord,
)

NAME = "taps"
GRADIENT = "gradient"
MISSING = "never ran"
Order = tuple[bool, int, int, str, int]


@dataclass(frozen=True)
class Call:
    """One row of one rank; `place` is its place in the step, '' if it never ran."""

    tap: str
    number: int
    stage: int
    digest: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.tap}[{self.number}]"

    @property
    def order(self) -> tuple[bool, int, int, str]:
        """Sorts as the module says."""
        backward = self.tap.endswith(f":{GRADIENT}")
        return (backward, self.number, -self.stage if backward else self.stage, self.place)


@dataclass(frozen=True)
class _Compared:
    """What one step of one rank showed."""

    different: list[tuple[Call, Call]]
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
        return error(NAME, "unsupported", "the run taps no module: say which with taps: [...]")
    ours, theirs = step_table(reference), step_table(candidate)
    pairs = [key for key in shared_pairs(ours, theirs) if key[1] in starts]
    seen = {key: _compare(ours[key], theirs[key], starts[key[1]]) for key in pairs}
    unseen = sorted({tap for each in seen.values() for tap in each.unseen})
    apart = ""
    if unseen:
        apart = f"; {count(len(unseen), 'tap')} ran in one leg only, {unseen[0]} first by name"
    bad = {key: each for key, each in seen.items() if each.different}
    equal = sum(each.equal for each in seen.values())
    if bad:
        return _failure(bad, apart, len(pairs))
    blind: str | None = f"no tapped module ran in both legs: nothing to compare{apart}"
    if equal:
        patterns = candidate.spec.config.get("taps", ())
        blind = _blind(patterns, pairs, ours, theirs, starts)
    if blind is not None:
        return error(NAME, "not_run", blind)
    message = f"{count(equal, 'call')} equal in {count(len(pairs), '(step, rank) pair')}{apart}"
    return passed(NAME, message, calls=equal, unseen=len(unseen))


def _blind(
    patterns: Iterable[str],
    pairs: Sequence[tuple[int, int]],
    ours: Mapping[tuple[int, int], StepRecord],
    theirs: Mapping[tuple[int, int], StepRecord],
    starts: Mapping[int, StartRecord],
) -> str | None:
    """What to say of the first pattern that compares nothing in the last step; None if all do."""
    last = max(step for step, _ in pairs)
    ran: dict[str, list[bool]] = {}
    for step, rank in pairs:
        if step != last:
            continue
        both = (calls(side[step, rank], starts[rank]) for side in (ours, theirs))
        for a, b in zip(*both, strict=True):
            sides = ran.setdefault(a.tap, [False, False])
            ran[a.tap] = [sides[0] or bool(a.place), sides[1] or bool(b.place)]
    for text in patterns:
        pattern = tap_pattern(text)
        meant = {tap: sides for tap, sides in ran.items() if _means(pattern, tap)}
        if meant and not any(all(sides) for sides in meant.values()):
            first, (in_ours, in_theirs) = min(meant.items())
            where = "in neither leg"
            if in_ours != in_theirs:
                where = (
                    f"in the {'reference' if in_ours else 'candidate'} alone, as graphs of the "
                    "other replay parts of it: tap what is inside, or the whole layer"
                )
            return f"the tap {text} compares nothing: at step {last} {first} ran {where}"
    return None


def _means(pattern: TapPattern, tap: str) -> bool:
    module, _, kind = tap.partition(":")
    return kind == pattern.kind and pattern.matches(module)


def _failure(bad: dict[tuple[int, int], _Compared], apart: str, num_pairs: int) -> CheckResult:
    step = min(bad)[0]
    here = [
        ((*(a if a.place else b).order, rank), a, b)
        for (at, rank), each in bad.items()
        if at == step
        for a, b in each.different
    ]
    (*_, rank), left, right = min(here, key=lambda found: found[0])
    ranks = {order[-1] for order, _, _ in here}
    module, _, kind = left.tap.partition(":")
    what = f"the gradient of the output of {module}" if kind == GRADIENT else left.tap
    shown = [call.digest if call.place else MISSING for call in (left, right)]
    return failed(
        NAME,
        "diverged",
        f"{what}, call {left.number}, differs first in program order, at step {step} on rank "
        f"{rank}: digest {shown[0]} became {shown[1]}; in that step "
        f"{count(len(here), 'call')} on {show_ranks(ranks)} "
        f"{'differs' if len(here) == 1 else 'differ'}, in all {len(bad)} of "
        f"{count(num_pairs, '(step, rank) pair')}{apart}",
        Difference(
            step=step, rank=rank, quantity=f"taps.{kind}", tensor=left.name,
            reference=shown[0], candidate=shown[1],
        ),
        differing_calls=len(here),
        differing_pairs=len(bad),
    )  # fmt: skip


def _compare(ours: StepRecord, theirs: StepRecord, start: StartRecord) -> _Compared:
    pairs = list(zip(calls(ours, start), calls(theirs, start), strict=True))
    ran = [{a.tap for a, _ in pairs if a.place}, {b.tap for _, b in pairs if b.place}]
    unseen = ran[0] ^ ran[1]
    both = [(a, b) for a, b in pairs if a.tap not in unseen]
    different = [(a, b) for a, b in both if (a.digest, not a.place) != (b.digest, not b.place)]
    equal = sum(bool(a.place) for a, _ in both) - sum(bool(a.place) for a, _ in different)
    return _Compared(different, equal, frozenset(unseen))


def calls(record: StepRecord, start: StartRecord) -> Iterator[Call]:
    """The rows of a step, in the order in which the start record names them."""
    for index, (name, stage) in enumerate(zip(start.taps, start.tap_stages, strict=False)):
        row = record.taps[index * TAP_HEX_CHARS : (index + 1) * TAP_HEX_CHARS]
        tap, _, number = name.rstrip("]").rpartition("[")
        place = row[DIGEST_HEX_CHARS:]
        yield Call(
            tap, int(number) if number.isdigit() else 0, stage, row[:DIGEST_HEX_CHARS],
            "" if place == NEVER_RAN else place,
        )  # fmt: skip
