"""Legs that ran in different environments are told apart, by key."""

import dataclasses
from typing import Any

import pytest

from harness.checks import evidence, judge
from tests.unit.harness.checks.conftest import place_of


def moved(run: Any, edit: Any, rank: int, values: dict[str, Any]) -> Any:
    start = dataclasses.replace(run.ranks[rank].start, environment=values)
    return edit.rank(run, rank, start=start)


def test_host_facts_beside_the_fingerprint_do_not_matter(lab: Any, edit: Any) -> None:
    """Only the fingerprint is compared where there is one."""
    reference, _, candidate = lab.legs()
    values = candidate.ranks[0].start.environment | {"host": "b", "pid": 7}
    answer = evidence.alike(reference, moved(candidate, edit, 0, values), "candidate")
    assert answer.outcome == "passed"
    assert answer.check == "environment:candidate"


@pytest.mark.parametrize(
    "values",
    [
        {"torch": "2.13", "threads": 1},
        {"threads": 1},
        {"torch": "2.12", "threads": 1, "gpu": None},
        {"torch": "2.12", "threads": 1.0},
        {"torch": "2.12", "threads": True},
    ],
)
def test_any_key_makes_it_incomparable(lab: Any, edit: Any, values: dict[str, Any]) -> None:
    """Another value, a lost key, a new key and another type each count, on any rank."""
    reference, _, candidate = lab.legs()
    moved_run = moved(candidate, edit, 1, {"fingerprint": values})
    answer = evidence.alike(reference, moved_run, "candidate")
    assert (answer.outcome, answer.what) == ("incomparable", "different_environment")
    where = place_of(answer)
    assert where.rank == 1
    assert where.quantity.removeprefix("environment.") in answer.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("processor", "AMD EPYC 9654 1f2e3d4c"), ("driver", "570.1.0"), ("device", "NVIDIA H100"),
     ("code", "0123"), ("environment", {"TORCHDYNAMO_DISABLE": "1"})],
)  # fmt: skip
def test_runs_on_machines_that_differ_are_incomparable(
    lab: Any, edit: Any, name: str, value: Any
) -> None:
    """Another CPU, GPU, driver, code or variable: no verdict over the bits, and it is named."""
    here = {"processor": "Intel Xeon 1f2e3d4c", "driver": "580.1.0", "device": "NVIDIA H200",
            "code": "abcd", "environment": {}}  # fmt: skip
    runs = []
    for run, known in zip(lab.legs(), (here, here, here | {name: value}), strict=True):
        for rank in (0, 1):
            run = moved(run, edit, rank, {"fingerprint": known, "host": run.spec.key})
        runs.append(run)
    verdict = judge(lab.case(), *runs)
    assert (verdict.outcome, verdict.what) == ("incomparable", "different_environment")
    where = place_of(verdict)
    assert where.quantity.startswith(("environment." + name, "environment.TORCH"))


def test_order_of_keys_does_not_matter(lab: Any, edit: Any) -> None:
    """Equal mappings written in another order are the same environment, nested ones too."""
    reference, _, candidate = lab.legs()
    for run, inner in ((0, {"a": 1, "b": 2}), (1, {"b": 2, "a": 1})):
        target = (reference, candidate)[run]
        edited = moved(target, edit, 0, {"fingerprint": {"flags": inner}})
        reference, candidate = (edited, candidate) if run == 0 else (reference, edited)
    assert evidence.alike(reference, candidate, "candidate").outcome == "passed"


def test_what_differs_is_named_inside_of_nested_values(lab: Any, edit: Any) -> None:
    """One variable of many is told by its name and both values, not the whole of both."""
    reference, _, candidate = lab.legs()
    left = {"environment": {"A": "1", "B": "2"}, "torch": "2.12"}
    right = {"environment": {"A": "1", "B": "2", "C": "3"}, "torch": "2.12"}
    answer = evidence.alike(
        moved(reference, edit, 1, {"fingerprint": left}),
        moved(candidate, edit, 1, {"fingerprint": right}),
        "candidate",
    )
    assert "rank 1 differs in environment.C (environment.C: absent against 3)" in answer.message
    where = place_of(answer)
    assert where.quantity == "environment.C"


def test_malformed_environment(lab: Any, edit: Any) -> None:
    """Without a fingerprint mapping the whole environment is compared; long values are cut."""
    reference, _, candidate = lab.legs()
    left = moved(reference, edit, 0, {"fingerprint": "x" * 500})
    right = moved(candidate, edit, 0, {"fingerprint": "y" * 500})
    answer = evidence.alike(left, right, "candidate")
    assert answer.outcome == "incomparable"
    assert len(answer.message) < 400
    headless = edit.rank(candidate, 0, start=None)
    assert evidence.alike(reference, headless, "candidate").outcome == "passed"
