"""Did two legs run in the same environment? Rank by rank, on the fingerprint of the start records.

Bits from two library versions or two kinds of GPU prove nothing about the code, so a difference
makes the case incomparable rather than failed.
"""

import json
from collections.abc import Mapping
from typing import Any

from harness.checks.answer import passed
from harness.checks.steps import rank_table
from harness.records import CheckResult, Difference, RunResult

NAME = "environment"
FINGERPRINT = "fingerprint"
MAX_VALUE_CHARS = 80


def check(reference: RunResult, other: RunResult, leg: str) -> CheckResult:
    """Compare the fingerprints of the ranks that both runs hold; `leg` names `other`."""
    name = f"{NAME}:{leg}"
    ours, theirs = rank_table(reference), rank_table(other)
    for rank, records in ours.items():
        counterpart = theirs.get(rank)
        if records.start is None or counterpart is None or counterpart.start is None:
            continue
        left, right = (
            fingerprint(records.start.environment),
            fingerprint(counterpart.start.environment),
        )
        keys = different_keys(left, right)
        if not keys:
            continue
        key = keys[0]
        return CheckResult(
            check=name,
            outcome="incomparable",
            what="different_environment",
            message=f"the {leg} ran in another environment than the reference: rank {rank} "
            f"differs in {', '.join(keys)} ({key}: {_show(left, key)} against "
            f"{_show(right, key)})",
            difference=Difference(
                step=0, rank=rank, quantity=f"environment.{key}",
                reference=_show(left, key), candidate=_show(right, key),
            ),
        )  # fmt: skip
    return passed(name, f"the {leg} ran in the environment of the reference")


def fingerprint(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of an environment that decides bits: its `fingerprint`, or all of it."""
    inner = environment.get(FINGERPRINT)
    return inner if isinstance(inner, Mapping) else environment


def different_keys(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Keys on which two fingerprints differ, an absent key included, sorted."""
    return sorted(key for key in {*left, *right} if _canonical(left, key) != _canonical(right, key))


def _canonical(values: Mapping[str, Any], key: str) -> str | None:
    # As JSON, 1 differs from 1.0 and True, which Python's == would take for the same setting.
    return json.dumps(values[key], sort_keys=True, default=repr) if key in values else None


def _show(values: Mapping[str, Any], key: str) -> str:
    text = str(values[key]) if key in values else "absent"
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
