"""What all checks share: the registry, records by step and rank, environment, answers, words."""

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from harness.program.spec import ENFORCED, program_of
from harness.provenance import different, fingerprint, flat, told
from harness.records import (
    ABSENT,
    AFTER,
    COPIES,
    DIGEST_HEX_CHARS,
    GROUP_ORDER,
    OTHERS,
    CaseSpec,
    CheckResult,
    Difference,
    FloatBits,
    InitialRecord,
    RankRecords,
    RunResult,
    StepRecord,
    What,
)
from harness.store import LEGS

Value = TypeVar("Value")
Key = tuple[int, int]  # step and rank
Options = Mapping[str, Any]  # of a check, by name; legal ones (`harness.checks.refusal`)
BEFORE = -1  # in place of a step's number: the state before the first one
StateTable = dict[Key, StepRecord | InitialRecord]
StepTable = dict[Key, StepRecord]
_SETTING = re.compile(r"(optimizer\d+\.)?group\d+\.")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of a case: `samples` round at random, `repeats` are timed, both sides in turn."""

    case: CaseSpec
    reference: RunResult
    control: RunResult
    candidate: RunResult
    samples: Sequence[RunResult] = ()
    repeats: Sequence[RunResult] = ()

    @property
    def legs(self) -> dict[str, RunResult]:
        return {name: getattr(self, name) for name in LEGS}


# --- the registry -------------------------------------------------------------------------------

Run = Callable[[Runs, Options], CheckResult]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A limit: an integer from `least` to `most`, a `number` above 0, or `bytes`: an integer from 1
    on, or a formula. `default` is filled in as a scenario is read."""

    doc: str
    kind: Literal["integer", "number", "bytes"] = "integer"
    least: int = 0
    most: int | None = None
    default: float | None = None

    @property
    def expected(self) -> str:
        if self.kind != "integer":
            return "a number > 0" + (" or a formula" if self.kind == "bytes" else "")
        if self.most is not None:
            return f"an integer from {self.least} to {self.most}"
        return f"an integer >= {self.least}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of the candidate.

    Attributes:
        compares: whether it compares values with the reference: a scenario needs one that does.
        is_exact: whether it compares digests, which a tolerance makes informative.
        needs_option: whether it asks nothing without one.
        always: "" if only where asked for; else of every case, or of every `program`'s.
        is_claim: whether it states what holds only if no other check says no: it comes last.
    """

    run: Run
    doc: str
    options: Mapping[str, Option] = field(default_factory=dict)
    compares: bool = False
    is_exact: bool = False
    needs_option: bool = False
    always: Literal["", "case", "program"] = ""
    is_claim: bool = False


CHECKS: dict[str, Check] = {}
"""By name: those that compare values, the others, claims; in each part by the alphabet."""


def check(name: str, doc: str, **about: Any) -> Callable[[Run], Run]:
    """Enter a function as the check `name`; `about` are fields of `Check`."""

    def enter(run: Run) -> Run:
        CHECKS[name] = Check(run=run, doc=doc, **about)
        for key in sorted(CHECKS, key=lambda n: (CHECKS[n].is_claim, not CHECKS[n].compares, n)):
            CHECKS[key] = CHECKS.pop(key)
        return run

    return enter


def refusal(name: str, options: Options) -> CheckResult | None:
    """An error if a stored case, maybe of another version, asks for no check or option here."""
    if (found := CHECKS.get(name)) is None:
        message = f"no check is named {name}; legal names: {', '.join(CHECKS)}"
        return error(name, "unsupported", message)
    wrong = sorted(set(options) - set(found.options))
    if wrong or (found.needs_option and not options):
        legal = " or ".join(found.options) or "no parameters"
        message = f"expected {legal}, got {', '.join(wrong) or 'none'}"
        return error(name, "unsupported", message)
    return None


def defaults(name: str) -> dict[str, float]:
    """What a scenario need not say of a check."""
    options = CHECKS[name].options.items()
    return {key: option.default for key, option in options if option.default is not None}


def table() -> Iterator[str]:
    """The checks and their options, as lines of a Markdown table."""
    yield from ("| check, option | legal values | default | meaning |", "| --- | --- | --- | --- |")
    when = {"": "", "case": "; always runs", "program": "; always runs of a program"}
    for name, found in CHECKS.items():
        yield f"| `{name}` | | | {found.doc}{when[found.always]} |"
        for key, option in found.options.items():
            default = "" if option.default is None else f"{option.default:g}"
            yield f"| `{name}.{key}` | {option.expected} | {default} | {option.doc} |"


# --- tables of records ------------------------------------------------------------------------


def step_table(run: RunResult) -> StepTable:
    """The first record of every (step, rank) of a run."""
    table: StepTable = {}
    for rank in run.ranks:
        for record in rank.steps:
            table.setdefault((record.step, rank.rank), record)
    return dict(sorted(table.items()))


def state_table(run: RunResult) -> StateTable:
    """Digests by (step, rank), with the state before the first step as step -1."""
    initial = ((rank, records.initial) for rank, records in rank_table(run).items())
    table: StateTable = {(BEFORE, rank): found for rank, found in initial if found is not None}
    return dict(sorted((table | step_table(run)).items()))


def rank_table(run: RunResult) -> dict[int, RankRecords]:
    """The first records of every rank, in rank order."""
    table: dict[int, RankRecords] = {}
    for records in run.ranks:
        table.setdefault(records.rank, records)
    return dict(sorted(table.items()))


def shared_pairs(a: Mapping[Key, object], b: Mapping[Key, object]) -> list[Key]:
    """The (step, rank) keys that both tables hold, in order."""
    return [key for key in a if key in b]


def groups_of(*holders: Iterable[str]) -> list[str]:
    """Digest groups in the order in which a difference is looked for."""
    found = dict.fromkeys(group for names in holders for group in names)
    first = [group for group in GROUP_ORDER if group in found]
    return [*first, *(group for group in found if group not in first)]


def place_in_step(group: str, name: str) -> float:
    """Where a difference of a step is looked for: an optimizer's settings, as its learning rate,
    before the weights that they decide; a program's own groups last."""
    place = GROUP_ORDER.index(group) if group in GROUP_ORDER else len(GROUP_ORDER)
    return place - 1.5 if group == "optim" and _SETTING.match(name) else place


def with_groups(run: RunResult, is_wanted: Callable[[int, str], bool]) -> RunResult:
    """A run whose records hold no other groups of digests; asked by rank and group."""

    def part(records: RankRecords) -> RankRecords:
        def kept(groups: Mapping[str, Value]) -> dict[str, Value]:
            return {name: each for name, each in groups.items() if is_wanted(records.rank, name)}

        start, initial = records.start, records.initial
        start = start and replace(start, tensors=kept(start.tensors))
        initial = initial and replace(initial, digests=kept(initial.digests))
        steps = tuple(replace(step, digests=kept(step.digests)) for step in records.steps)
        return replace(records, start=start, initial=initial, steps=steps)

    return replace(run, ranks=tuple(map(part, run.ranks)))


def with_same_groups(*runs: RunResult) -> tuple[RunResult, ...]:
    """The runs without `COPIES` where their strategies keep other ones; of `OTHERS`, and of the
    state after the last step, what all hold.

    Modules of a class of which one run has more or others are left out: digests are `ABSENT`.
    """
    sharded = [run.spec.config.get("fsdp", {}) for run in runs]
    if len({(fsdp.get("strategy"), fsdp.get("outer_strategy")) for fsdp in sharded}) > 1:
        runs = tuple(with_groups(run, lambda _, group: group != COPIES) for run in runs)
    held = [_groups_held(run) for run in runs]
    everything = set[tuple[int, str]]().union(*held)
    ends = {each for each in everything if each[1].endswith(AFTER)}
    if lone := ends.difference(ends.intersection(*held)):
        runs = tuple(with_groups(run, lambda *each: each not in lone) for run in runs)
    groups = {group for _, group in ends - lone}
    groups |= {OTHERS for _, group in everything if group == OTHERS}
    for group in sorted(groups):
        runs = _shared(group, *runs)
    return runs


def _groups_held(run: RunResult) -> set[tuple[int, str]]:
    return {(each.rank, group) for each in run.ranks if each.start for group in each.start.tensors}


def ranks_after(run: RunResult) -> set[int]:
    """Ranks with a record of the state after the last step."""
    return {rank for rank, group in _groups_held(run) if group.endswith(AFTER)}


def _shared(group: str, *runs: RunResult) -> tuple[RunResult, ...]:
    """The runs, of a group with what all of them hold."""
    tables = [_digests_of(group, run) for run in runs]
    held = [{(rank, name) for (_, rank), t in table.items() for name in t} for table in tables]
    odd = {unit_of(group, name) for each in held for _, name in each ^ held[0]}
    odd = odd if group.startswith(OTHERS) else set()

    def part(table: _Digests, records: RankRecords) -> RankRecords:
        names = records.start.tensors.get(group, ()) if records.start else ()

        def laid(record: Any, step: int) -> Any:
            if record is None or group not in record.digests:
                return record
            here = [each.get((step, records.rank), {}) for each in tables]
            own = table[step, records.rank]
            # A module may live longer in one run, until the garbage is collected.
            left_out = odd.union(*(in_one_only(group, here[0], each) for each in here))
            text = "".join(
                own[name] if name in own and unit_of(group, name) not in left_out else ABSENT
                for name in names
            )  # fmt: skip
            return replace(record, digests={**record.digests, group: text})

        steps = tuple(laid(step, step.step) for step in records.steps)
        return replace(records, initial=laid(records.initial, BEFORE), steps=steps)

    return tuple(
        replace(run, ranks=tuple(part(table, records) for records in run.ranks))
        for run, table in zip(runs, tables, strict=True)
    )


_Digests = Mapping[Key, Mapping[str, str]]


def _digests_of(group: str, run: RunResult) -> _Digests:
    """Digests of a group that there are, by step and rank."""
    found: dict[Key, dict[str, str]] = {}
    size, starts = DIGEST_HEX_CHARS, {r: each.start for r, each in rank_table(run).items()}
    for key, record in state_table(run).items():
        start, text = starts[key[1]], record.digests.get(group, "")
        names = start.tensors.get(group, ()) if start and text.strip(ABSENT[0]) else ()
        chunks = {name: text[i * size : (i + 1) * size] for i, name in enumerate(names)}
        found[key] = {name: each for name, each in chunks.items() if each not in ("", ABSENT)}
    return found


def in_one_only(group: str, ours: Iterable[str], theirs: Iterable[str]) -> set[str]:
    """Units (`unit_of`) that only one side has, whose digests cannot be compared."""
    return {unit_of(group, name) for name in {*ours} ^ {*theirs}}


def unit_of(group: str, name: str) -> str:
    """What is compared, or left out, as a whole: of `OTHERS` all modules of a class, `EMA` of
    `EMA#2.layers.0.weight`; else each tensor."""
    return name.partition(".")[0].partition("#")[0] if group.startswith(OTHERS) else name


# --- the environment of two runs --------------------------------------------------------------

ENVIRONMENT = "environment"
DETERMINISTIC = "deterministic"  # of the event, and no part of the environment
_OF_TORCH = ("cuda", "cudnn", "nccl")
_OF_THREADS = ("environment.OMP_NUM_THREADS", "environment.MKL_NUM_THREADS")
_MOST_NAMES = 4
_HEX = frozenset("0123456789abcdef")


def alike(reference: RunResult, other: RunResult, leg: str) -> CheckResult:
    """Compare the fingerprints of the ranks that both runs hold; `leg` names `other`.

    Bits of two library versions or two kinds of GPU prove nothing about the code: `incomparable`.
    """
    name, theirs = f"{ENVIRONMENT}:{leg}", rank_table(other)
    stated = stated_leaves(reference, other)
    for rank, records in rank_table(reference).items():
        counterpart = theirs.get(rank)
        if records.start is None or counterpart is None or counterpart.start is None:
            continue
        found = different_leaves(known_of(records), known_of(counterpart))
        leaves = [each for each in found if each[0] not in stated]
        if not leaves:
            continue
        leaf, before, after = leaves[0]
        names = ", ".join(each for each, *_ in leaves[:_MOST_NAMES])
        more = f" and {len(leaves) - _MOST_NAMES} more" if len(leaves) > _MOST_NAMES else ""
        message = f"the {leg} ran in another environment than the reference: rank {rank} differs in"
        message += f" {names}{more} ({leaf}: {before} against {after})"
        place = Difference(step=0, rank=rank, quantity=quantity_of(leaf), reference=before,
                           candidate=after)  # fmt: skip
        return incomparable(name, "different_environment", message, place)
    return passed(name, f"the {leg} ran in the environment of the reference")


def known_of(records: RankRecords) -> dict[str, Any]:
    """The fingerprint, with what a program's rank could only say once it had begun."""
    known = dict(fingerprint(records.start.environment)) if records.start is not None else {}
    for detail in records.said(ENVIRONMENT):
        known |= {key: value for key, value in detail.items() if key != DETERMINISTIC}
    return known


def stated_leaves(reference: RunResult, other: RunResult) -> set[str]:
    """Leaves in which a scenario itself makes the two runs of a program differ."""
    ours, theirs = (program_of(run.spec.config) for run in (reference, other))
    if ours is None or theirs is None:
        return set()
    found = {f"environment.{name}" for name in different(ours.env, theirs.env)}
    if (ours.kind, ours.target, ours.folder) != (theirs.kind, theirs.target, theirs.folder):
        found.add("program")
    for name in different(ours.packages, theirs.packages):
        found |= {f"packages.{name}", name, *(_OF_TORCH if name == "torch" else ())}
    if ours.determinism != theirs.determinism:
        found |= {f"environment.{name}" for name in ENFORCED}
    return found | ({"threads"} if found.intersection(_OF_THREADS) else set())


def different_leaves(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """What differs between two fingerprints: dotted name, and both values for people."""
    ours, theirs = ({n: v for n, v in flat("", side).items() if v != {}} for side in (left, right))
    return [(n, told(ours, n), told(theirs, n)) for n in sorted(different(ours, theirs))]


def quantity_of(name: str) -> str:
    """What a `Difference` calls a leaf of the fingerprint: `environment.torch`."""
    return name if name.startswith(f"{ENVIRONMENT}.") else f"{ENVIRONMENT}.{name}"


# --- answers ----------------------------------------------------------------------------------


def passed(check: str, message: str, **figures: float) -> CheckResult:
    """The check ran and said yes."""
    return CheckResult(check=check, outcome="passed", what="", message=message, figures=figures)


def failed(
    check: str, what: What, message: str, difference: Difference | None = None, /, **figures: float
) -> CheckResult:
    """The check ran and said no."""
    return CheckResult(check=check, outcome="failed", what=what, message=message,
                       difference=difference, figures=figures)  # fmt: skip


def diverged(
    check: str, named: str, found: Difference, noun: str, places: Collection[tuple[int, str]],
    pairs: tuple[int, int], note: str = "",
) -> CheckResult:  # fmt: skip
    """The runs differ first in what is `named`, as `found` says, and in that step in all `places`,
    rank and name, each a `noun`; `pairs` of (step, rank) differ, and were compared."""
    names, ranks = len({name for _, name in places}), {rank for rank, _ in places}
    message = f"{named} differs first {where(found)}; in that step {count(names, noun)} on "
    message += f"{show_ranks(ranks)} {'differs' if names == 1 else 'differ'}; {pairs[0]} of "
    message += f"{count(pairs[1], 'record')} of a step and rank differ{note}"
    figures = {f"differing_{noun}s": names, "differing_ranks": len(ranks), "pairs": pairs[1]}
    return failed(check, "diverged", message, found, **figures, differing_pairs=pairs[0])


def error(check: str, what: What, message: str) -> CheckResult:
    """The check has no answer, through no fault of the candidate."""
    return CheckResult(check=check, outcome="error", what=what, message=message)


def incomparable(
    check: str, what: What, message: str, difference: Difference | None = None, /, **figures: float
) -> CheckResult:
    """The runs were made in ways that leave the question open."""
    return replace(failed(check, what, message, difference, **figures), outcome="incomparable")


def not_run(check: str, why: str) -> CheckResult:
    """The check could not run over the whole of both runs; it never counts as a pass."""
    return CheckResult(check=check, outcome="skipped", what="not_run", message=f"not run: {why}")


# --- words ------------------------------------------------------------------------------------


def where(found: Difference) -> str:
    """`at step 3 on rank 1: 2.5 (0x40200000) became missing`; two digests tell people nothing."""
    texts = (found.reference, found.candidate)
    sides = [
        text if set(text) - _HEX or len(text) < DIGEST_HEX_CHARS else "a digest" for text in texts
    ]
    values = f": {sides[0]} became {sides[1]}" if sides != ["a digest"] * 2 else ""
    at = "after the last step" if found.quantity.endswith(AFTER) else when(found.step)
    return f"{at} on rank {found.rank}{values}"


def when(step: int) -> str:
    """`at step 3`, `before step 0`."""
    return "before step 0" if step == BEFORE else f"at step {step}"


def show_float(value: FloatBits | None) -> str:
    """Digits that tell any two floats of that width apart, and the bit pattern; `missing`."""
    if value is None:
        return "missing"
    number = struct.unpack(">d" if value.is_double else ">f", bytes.fromhex(value.bits))[0]
    return f"{number:.{17 if value.is_double else 9}g} (0x{value.bits})"


def show_ranks(ranks: set[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 3`, or a count past eight."""
    *first, last = sorted(ranks)
    if len(first) > 7:
        return f"{len(ranks)} ranks ({first[0]} to {last})"
    return f"ranks {', '.join(map(str, first))} and {last}" if first else f"rank {last}"


def count(number: int, noun: str) -> str:
    """`1 tensor`, `2,000 tensors`, `2 microbatches`."""
    plural = "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
