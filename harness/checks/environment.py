"""Did two legs run in the same environment? Rank by rank, on the fingerprint of the start records.

Bits from two library versions or two kinds of GPU prove nothing about the code, so a difference
makes the case incomparable rather than failed.
"""

import json
from collections.abc import Mapping
from typing import Any

from harness.checks.answer import passed
from harness.checks.evidence import rank_table
from harness.program.spec import ENFORCED, program_of
from harness.provenance import fingerprint
from harness.records import CheckResult, Difference, RankRecords, RunResult

NAME = "environment"
MAX_VALUE_CHARS = 80
MAX_NAMES = 4
NOT_OF_IT = ("deterministic",)
"""Facts of the event that are no part of the environment: a program may compare them."""
OF_TORCH = ("cuda", "cudnn", "nccl")
"""What a release of torch brings along."""
OF_THREADS = ("environment.OMP_NUM_THREADS", "environment.MKL_NUM_THREADS")
"""Variables that decide how many threads torch finds."""


def check(reference: RunResult, other: RunResult, leg: str) -> CheckResult:
    """Compare the fingerprints of the ranks that both runs hold; `leg` names `other`."""
    name = f"{NAME}:{leg}"
    ours, theirs = rank_table(reference), rank_table(other)
    for rank, records in ours.items():
        counterpart = theirs.get(rank)
        if records.start is None or counterpart is None or counterpart.start is None:
            continue
        left, right = _known_of(records), _known_of(counterpart)
        stated = stated_leaves(reference, other)
        leaves = [each for each in different_leaves(left, right) if each[0] not in stated]
        if not leaves:
            continue
        leaf, before, after = leaves[0]
        return CheckResult(
            check=name,
            outcome="incomparable",
            what="different_environment",
            message=f"the {leg} ran in another environment than the reference: rank {rank} "
            f"differs in {_listed([each for each, *_ in leaves])} ({leaf}: {before} against "
            f"{after})",
            difference=Difference(
                step=0, rank=rank, quantity=quantity_of(leaf), reference=before, candidate=after
            ),
        )  # fmt: skip
    return passed(name, f"the {leg} ran in the environment of the reference")


def _known_of(records: RankRecords) -> Mapping[str, Any]:
    """The fingerprint, with what a program's rank could only say once it had begun."""
    assert records.start is not None
    known = dict(fingerprint(records.start.environment))
    for event in records.events:
        if event.name == NAME:
            known |= {k: v for k, v in event.detail.items() if k not in NOT_OF_IT}
    return known


def stated_leaves(reference: RunResult, other: RunResult) -> set[str]:
    """Leaves in which a scenario itself makes the two runs of a program differ."""
    programs = [program_of(run.spec.config) for run in (reference, other)]
    if None in programs:
        return set()
    found: set[str] = set()
    ours, theirs = (each for each in programs if each is not None)
    if (ours.kind, ours.target, ours.folder) != (theirs.kind, theirs.target, theirs.folder):
        found.add("program")
    for name in {*ours.env, *theirs.env}:
        if ours.env.get(name) != theirs.env.get(name):
            found.add(f"environment.{name}")
    for name in {*ours.packages, *theirs.packages}:
        if ours.packages.get(name) != theirs.packages.get(name):
            found |= {f"packages.{name}", name}
            found |= set(OF_TORCH) if name == "torch" else set()
    if ours.determinism != theirs.determinism:
        found |= {f"environment.{name}" for name in ENFORCED}
    if found.intersection(OF_THREADS):
        found.add("threads")
    return found


def different_keys(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Keys on which two fingerprints differ, an absent key included, sorted."""
    return sorted(key for key in {*left, *right} if _canonical(left, key) != _canonical(right, key))


def different_leaves(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """What differs inside of nested values, too: dotted name, and both values for people."""
    found: list[tuple[str, str, str]] = []
    for key in different_keys(left, right):
        ours, theirs = left.get(key), right.get(key)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            found += [
                (f"{key}.{name}", before, after)
                for name, before, after in different_leaves(ours, theirs)
            ]
        else:
            found.append((key, _show(left, key), _show(right, key)))
    return found


def quantity_of(name: str) -> str:
    """What a `Difference` calls a leaf of the fingerprint: `environment.torch`."""
    return name if name.startswith(f"{NAME}.") else f"{NAME}.{name}"


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _canonical(values: Mapping[str, Any], key: str) -> str | None:
    # As JSON, 1 differs from 1.0 and True, which Python's == would take for the same setting.
    return json.dumps(values[key], sort_keys=True, default=repr) if key in values else None


def _show(values: Mapping[str, Any], key: str) -> str:
    text = str(values[key]) if key in values else "absent"
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
