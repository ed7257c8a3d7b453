"""Did two runs have the same environment, and why does a program not repeat itself?

Environments are compared rank by rank, on the fingerprint of the start records. Bits from two
library versions or two kinds of GPU prove nothing about the code, so a difference makes the case
incomparable rather than failed.

    first difference of two equal runs           likely cause
    random generators before step 0              seed: nobody seeds them
    weights before step 0                        initialisation
    inputs of the first module that differs      data: its order, or augmentation from the clock
    losses, from equal state                     forward: data, or a nondeterministic operator
    gradients, from equal losses                 backward: an operator, or the order of a reduction
    weights or optimizer, from equal gradients   update: an operator of the optimizer
    random generators after a step               draws: their number depends on time or threads
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.checks.evidence import BEFORE, passed, rank_table, state_table, step_table
from harness.program.spec import ENFORCED, program_of
from harness.provenance import fingerprint
from harness.records import CheckResult, Difference, RankRecords, RunResult

NAME = "environment"
MAX_VALUE_CHARS = 80
MAX_NAMES = 4
DETERMINISTIC = "deterministic"
"""A fact of the event that is no part of the environment: a program may compare it."""
OF_TORCH = ("cuda", "cudnn", "nccl")
"""What a release of torch brings along."""
OF_THREADS = ("environment.OMP_NUM_THREADS", "environment.MKL_NUM_THREADS")
"""Variables that decide how many threads torch finds."""


def alike(reference: RunResult, other: RunResult, leg: str) -> CheckResult:
    """Compare the fingerprints of the ranks that both runs hold; `leg` names `other`."""
    name, theirs = f"{NAME}:{leg}", rank_table(other)
    stated = stated_leaves(reference, other)
    for rank, records in rank_table(reference).items():
        counterpart = theirs.get(rank)
        if records.start is None or counterpart is None or counterpart.start is None:
            continue
        found = different_leaves(_known_of(records), _known_of(counterpart))
        leaves = [each for each in found if each[0] not in stated]
        if not leaves:
            continue
        leaf, before, after = leaves[0]
        more = len(leaves) - MAX_NAMES
        names = ", ".join(each for each, *_ in leaves[:MAX_NAMES])
        names += f" and {more} more" if more > 0 else ""
        return CheckResult(
            check=name,
            outcome="incomparable",
            what="different_environment",
            message=f"the {leg} ran in another environment than the reference: rank {rank} "
            f"differs in {names} ({leaf}: {before} against {after})",
            difference=Difference(
                step=0, rank=rank, quantity=quantity_of(leaf), reference=before, candidate=after
            ),
        )
    return passed(name, f"the {leg} ran in the environment of the reference")


def _known_of(records: RankRecords) -> Mapping[str, Any]:
    """The fingerprint, with what a program's rank could only say once it had begun."""
    assert records.start is not None
    known = dict(fingerprint(records.start.environment))
    for event in records.events:
        if event.name == NAME:
            known |= {key: value for key, value in event.detail.items() if key != DETERMINISTIC}
    return known


def stated_leaves(reference: RunResult, other: RunResult) -> set[str]:
    """Leaves in which a scenario itself makes the two runs of a program differ."""
    ours, theirs = (program_of(run.spec.config) for run in (reference, other))
    if ours is None or theirs is None:
        return set()
    found: set[str] = set()
    if (ours.kind, ours.target, ours.folder) != (theirs.kind, theirs.target, theirs.folder):
        found.add("program")
    found |= {f"environment.{name}" for name in different_keys(ours.env, theirs.env)}
    for name in different_keys(ours.packages, theirs.packages):
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
            inner = different_leaves(ours, theirs)
            found += [(f"{key}.{name}", before, after) for name, before, after in inner]
        else:
            found.append((key, _show(left, key), _show(right, key)))
    return found


def quantity_of(name: str) -> str:
    """What a `Difference` calls a leaf of the fingerprint: `environment.torch`."""
    return name if name.startswith(f"{NAME}.") else f"{NAME}.{name}"


def _canonical(values: Mapping[str, Any], key: str) -> str | None:
    # As JSON, 1 differs from 1.0 and True, which Python's == would take for the same setting.
    return json.dumps(values[key], sort_keys=True, default=repr) if key in values else None


def _show(values: Mapping[str, Any], key: str) -> str:
    text = str(values[key]) if key in values else "absent"
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


# --- why a program does not repeat itself -----------------------------------------------------

Kind = Literal["seed", "initialisation", "data", "forward", "backward", "update", "draws"]
_TOLD: dict[Kind, str] = {
    "seed": "random generators are not seeded",
    "initialisation": "weights are drawn from an unseeded generator, or loaded from elsewhere",
    "data": "the program read other data: unseeded shuffling, or workers in another order",
    "forward": "the program read other data, or an operator of the forward pass varies",
    "backward": "an operator of the backward pass is not deterministic",
    "update": "an operator of the optimizer is not deterministic",
    "draws": "random numbers are drawn by the clock, by threads or by library code",
}


@dataclass(frozen=True)
class Cause:
    """The likely cause, in words, and what to do about it."""

    kind: Kind
    told: str
    remedy: str

    def __str__(self) -> str:
        return f"likely cause: {self.told}; {self.remedy}"


def cause_of(reference: RunResult, control: RunResult, first: Difference) -> Cause:
    """The likely cause of the first difference between a program's own two runs."""
    kind = _kind(reference, control, first)
    told = _TOLD[kind]
    if kind == "backward" and reference.spec.world_size > 1:
        told += ", or a collective adds its parts in another order (NCCL_ALGO)"
    program = program_of(reference.spec.config)
    events = [event for records in reference.ranks for event in records.events]
    is_asked = any(e.name == NAME and e.detail.get(DETERMINISTIC) is True for e in events)
    remedy = "set determinism: enforce, which seeds the generators and asks for such operators"
    if program is not None and program.determinism == "enforce":
        remedy = (
            "determinism is enforced already: look for generators of the program's own, worker "
            "processes, and what depends on time"
        )
    elif kind in ("backward", "update", "forward") and is_asked:
        remedy = "torch is asked for deterministic operators already: look for kernels of others"
    return Cause(kind, told, remedy)


def _kind(reference: RunResult, control: RunResult, first: Difference) -> Kind:
    if first.quantity == "taps.input":
        return "data"
    if first.quantity.startswith("taps."):
        return "backward" if first.quantity.endswith("gradient") else "forward"
    key = (first.step, first.rank)
    left, right = state_table(reference).get(key), state_table(control).get(key)
    ours, theirs = left.digests if left and right else {}, right.digests if right else {}
    groups = {group for group, text in ours.items() if text != theirs.get(group)}
    if first.step == BEFORE:
        return "initialisation" if "weights" in groups else "seed"
    mine, other = step_table(reference).get(key), step_table(control).get(key)
    if mine is None or other is None or mine.microbatch_losses != other.microbatch_losses:
        return "forward"
    if groups & {"grads", "losses", "buffers"}:
        return "backward"
    return "update" if groups & {"weights", "optim"} else "draws"
