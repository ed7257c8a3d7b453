"""What two runs, or two nights, ran in: what differs between them is said before anything else.

    commit      of the program under test, with a hash of what lies on top    nights
    packages    versions of Python, torch and all that is installed           nights, legs
    driver      of the GPUs                                                   nights
    variables   that decide results                                           nights, legs
    hardware    cores, memory, GPUs, what the CPU is capable of               nights, legs
    data        checksum of the tokens                                        nights, legs
    kernels     operators and kernels that a step launched, by name           nights, legs

Legs are compared by what their ranks recorded, nights by their manifests as well. What one side did
not record is `unknown`: it is said, and it is not the same. Kernels are recorded where a scenario
asks for them (`launch: {kernels: true}`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.checks.evidence import stated_leaves
from harness.codec import Json
from harness.history.entries import work_of
from harness.provenance import Facts, Kind, different, facts, fingerprint, flat, told
from harness.records import CaseSpec, RankRecords, RunResult, RunSpec
from harness.store import LEGS, RunFolder

KINDS: tuple[Kind, ...] = (
    "commit", "packages", "driver", "variables", "hardware", "data", "kernels",
)  # fmt: skip
LEG_KINDS: tuple[Kind, ...] = ("packages", "variables", "hardware", "data", "kernels")
LAUNCHED = "launched"
"""Name of the event with what a rank launched."""
_PACKAGES = ("python", "torch", "cuda", "nccl", "cudnn", "code", "program")
_MAX_TOLD = 3


@dataclass(frozen=True, kw_only=True)
class EnvironmentFact(Json):
    """One fact in which the two sides differ; `absent` where one has no such thing."""

    kind: Kind
    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class EnvironmentDifference(Json):
    """Two environments beside each other.

    Attributes:
        before, after: what was compared, in words: two legs, or two run folders.
        facts: what differs, in the order of `KINDS`.
        same: kinds that both recorded and that are equal.
        unknown: kinds that not both recorded.
    """

    before: str
    after: str
    facts: tuple[EnvironmentFact, ...] = ()
    same: tuple[Kind, ...] = ()
    unknown: tuple[Kind, ...] = ()

    @property
    def sentence(self) -> str:
        """One line for people."""
        missing = f"; not recorded by both: {', '.join(self.unknown)}" if self.unknown else ""
        if not self.facts:
            same = ", ".join(self.same) or "nothing"
            return f"no difference of environment in {same}{missing}"
        words = [f"{f.name} {f.before} became {f.after}" for f in self.facts[:_MAX_TOLD]]
        more = len(self.facts) - len(words)
        rest = f" and {more} more" if more else ""
        return (
            f"{self.before} and {self.after} ran in other environments: "
            f"{'; '.join(words)}{rest}{missing}"
        )


def of_legs(reference: RunResult, candidate: RunResult) -> EnvironmentDifference:
    """The environments of two legs, as their ranks recorded them."""
    sides = facts_of_run(reference), facts_of_run(candidate)
    found = compare("the reference", "the candidate", *sides, kinds=LEG_KINDS)
    stated = stated_leaves(reference, candidate)
    facts = tuple(fact for fact in found.facts if fact.name.rpartition(": ")[2] not in stated)
    return replace(found, facts=facts)


def of_nights(before: RunFolder, after: RunFolder, case_id: str = "") -> EnvironmentDifference:
    """The environments of two run folders; of the runs of one case where it is named.

    Runs are compared that did equal work: those of equal configuration, device and plant.
    """
    ours, theirs = facts(before.manifest), facts(after.manifest)
    for name, left, right in _pairs(before, after, case_id):
        for kinds, run in ((ours, left), (theirs, right)):
            for kind, values in facts_of_run(run).items():
                held = kinds.setdefault(kind, {})
                held |= {f"{name}: {key}" if kind == "kernels" else key: value
                         for key, value in values.items()}  # fmt: skip
    return compare(before.path.name, after.path.name, ours, theirs)


def compare(
    before: str,
    after: str,
    ours: Facts,
    theirs: Facts,
    *,
    kinds: tuple[Kind, ...] = KINDS,
) -> EnvironmentDifference:
    """Lay the facts of two sides beside each other.

    Args:
        before, after: names of the sides.
        ours, theirs: their facts.
        kinds: what is asked for.
    """
    facts: list[EnvironmentFact] = []
    same: list[Kind] = []
    unknown: list[Kind] = []
    for kind in kinds:
        left, right = ours.get(kind), theirs.get(kind)
        if left is None or right is None:
            unknown.append(kind)
            continue
        names = different(left, right)
        if not names:
            same.append(kind)
        facts += [
            EnvironmentFact(kind=kind, name=name, before=told(left, name), after=told(right, name))
            for name in names
        ]
    return EnvironmentDifference(
        before=before, after=after, facts=tuple(facts), same=tuple(same), unknown=tuple(unknown)
    )


def facts_of_run(run: RunResult) -> Facts:
    """What the ranks of a run recorded; a value that all ranks share stands once."""
    facts: Facts = {}
    for rank, records in enumerate(run.ranks):
        for kind, values in _facts_of_rank(records).items():
            held = facts.setdefault(kind, {})
            held |= {f"rank {rank}: {name}": value for name, value in values.items()}
    num_ranks = len(run.ranks)
    return {kind: _shared(values, num_ranks) for kind, values in facts.items()}


def _facts_of_rank(records: RankRecords) -> Facts:
    facts: Facts = {}
    if records.start is not None:
        facts = {"packages": {}, "variables": {}, "hardware": {}}
        for name, value in flat("", fingerprint(records.start.environment)).items():
            facts.setdefault(_kind_of(name), {})[name] = value
    for event in records.events:
        if event.name == LAUNCHED:
            facts["kernels"] = flat("", event.detail)
    return facts


def _kind_of(name: str) -> Kind:
    if name in _PACKAGES or name.startswith("packages."):
        return "packages"
    if name == "data":
        return "data"
    return "variables" if name.partition(".")[0] in ("environment", "deterministic") else "hardware"


def _shared(values: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """`rank 0: x` and so on as `x`, where every rank has it and all say the same."""
    by_name: dict[str, dict[str, Any]] = {}
    for full, value in values.items():
        by_name.setdefault(full.partition(": ")[2], {})[full] = value
    shared: dict[str, Any] = {}
    for name, of_ranks in by_name.items():
        told_values = {repr(value) for value in of_ranks.values()}
        alike = len(of_ranks) == num_ranks and len(told_values) == 1
        shared |= {name: next(iter(of_ranks.values()))} if alike else of_ranks
    return shared


def _pairs(
    before: RunFolder, after: RunFolder, case_id: str
) -> Iterable[tuple[str, RunResult, RunResult]]:
    """Runs of both folders that did equal work, each once, by leg."""
    theirs = {case.id: case for case in after.cases}
    seen: set[str] = set()
    for case in before.cases:
        other = theirs.get(case.id)
        if other is None or case_id not in ("", case.id):
            continue
        for leg in LEGS:
            left, right = _spec(case, leg), _spec(other, leg)
            if work_of(left) == work_of(right) and left.key not in seen:
                seen.add(left.key)
                yield f"{case.id} {leg}", before.load_run(left), after.load_run(right)


def _spec(case: CaseSpec, leg: str) -> RunSpec:
    spec: RunSpec = getattr(case, leg)
    return spec
