"""Data-parallel ranks that read the same samples in every run fail the case."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig
from fsdp_core.layouts import Dense, dense_coordinates
from harness.checks import judge
from harness.checks.exact import same_data
from harness.records import SAMPLES, RunResult

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2}, {"dp_outer": 2, "dp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2},
    {"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
]  # fmt: skip
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 8}
Choice = Callable[[Dense, int], object]


def read(run: RunResult, choice: Choice, **config: Any) -> RunResult:
    """The run with a digest of tokens that follows from the rank's place and the step."""
    spec = dataclasses.replace(run.spec, config=run.spec.config | config)
    ranks = []
    for records in run.ranks:
        assert records.start is not None
        place = dense_coordinates(ParallelConfig(**config["parallel"]), records.rank)
        steps = []
        for step in records.steps:
            text = str(choice(place, step.step))
            digests = step.digests | {SAMPLES: 2 * hashlib.md5(text.encode()).hexdigest()}
            steps.append(dataclasses.replace(step, digests=digests))
        tensors = records.start.tensors | {SAMPLES: ("tokens", "targets")}
        start = dataclasses.replace(records.start, tensors=tensors)
        ranks.append(dataclasses.replace(records, start=start, steps=tuple(steps)))
    outcome = dataclasses.replace(run.outcome, key=spec.key)
    return dataclasses.replace(run, spec=spec, outcome=outcome, ranks=tuple(ranks))


def own(place: Dense, step: int) -> object:
    """What the sampler gives: ranks of tp and pp read the same."""
    return step, place.dp_outer, place.dp, place.cp


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("axis", ["", "dp_outer", "dp", "cp"])
def test_each_part_of_the_batch_is_read_by_its_own_ranks(
    make_lab: Any, parallel: dict[str, Any], axis: str
) -> None:
    """Peers of tp, pp, ep and etp read alike; an axis along which all do otherwise is found."""
    size = ParallelConfig(**parallel).world_size

    def choice(place: Dense, step: int) -> object:
        return own(place._replace(**{axis: 0}) if axis else place, step)

    plain = make_lab(world_size=size).legs()[0]
    model = EXPERTS if "ep" in parallel else {}
    run = read(plain, choice, parallel=parallel, model=model)
    found = same_data(run, "reference")
    if parallel.get(axis, 1) == 1:
        assert found is None
        return
    assert found is not None
    assert (found.outcome, found.what) == ("failed", "same_data")
    where = found.difference
    assert where is not None
    first = next(r for r in range(size) if getattr(_at(parallel, r), axis))
    assert (where.rank, where.quantity, where.tensor) == (first, SAMPLES, "tokens")
    other = int(found.figures["same_as_rank"])
    assert _at(parallel, other) == _at(parallel, first)._replace(**{axis: 0})


def _at(parallel: dict[str, Any], rank: int) -> Dense:
    return dense_coordinates(ParallelConfig(**parallel), rank)


def alike(place: Dense, step: int) -> object:
    """A sampler that knows no ranks."""
    del place
    return step


@pytest.mark.parametrize(
    ("steps", "choice", "config"),
    [
        (4, lambda place, step: (step, place.dp if step == 2 else 0), {}),
        (1, alike, {"microbatches": 2}),
        (4, alike, {"model": {"vocab_size": 1}}),
        (8, alike, {"model": {"vocab_size": 2}}),
        (5, alike, {"data": {"kind": "text", "path": "short.txt"}}),
        (8, lambda place, step: 0, {"data": {"kind": "text", "path": "short.txt"}}),
    ],
)
def test_what_is_equal_by_chance_is_no_failure(
    make_lab: Any, steps: int, choice: Choice, config: dict[str, Any]
) -> None:
    """One step of other samples, too few sequences to tell, one token in all, two; a corpus of
    which nobody knows the length, or of one sequence.
    """
    run = make_lab(steps=steps).legs()[0]
    assert same_data(read(run, choice, parallel={"dp": 2}, **config), "reference") is None


def test_of_other_programs_nothing_is_asked(lab: Any) -> None:
    """Nobody knows which of their ranks share their data; records may be older than the group."""
    run = read(lab.legs()[0], alike, parallel={"dp": 2})
    program = {"program": {"script": "train.py"}}
    spec = dataclasses.replace(run.spec, config=run.spec.config | program)
    assert same_data(dataclasses.replace(run, spec=spec), "reference") is None
    assert same_data(lab.legs()[0], "reference") is None


@pytest.mark.parametrize(("choice", "outcome"), [(alike, "failed"), (own, "passed")])
def test_the_same_data_in_every_run_fails_the_case(lab: Any, choice: Choice, outcome: str) -> None:
    """No comparison sees it: the cause is a field of the verdict."""
    runs = [read(run, choice, parallel={"dp": 2}) for run in lab.legs()]
    names = ("reference", "control", "candidate")
    specs = {name: run.spec for name, run in zip(names, runs, strict=True)}
    case = dataclasses.replace(lab.case(), **specs)
    verdict = judge(case, *runs)
    assert verdict.outcome == outcome, verdict.message
    if outcome == "failed":
        assert (verdict.what, verdict.check) == ("same_data", "samples")
        assert verdict.difference is not None
        assert verdict.difference.rank == 1


def test_a_corpus_that_is_read_alike_in_many_steps_is_a_failure(make_lab: Any) -> None:
    """No two steps of it are alike, so that it is longer than what is read."""
    run = make_lab(steps=6).legs()[0]
    corpus = {"data": {"kind": "text", "path": "corpus.txt"}}
    found = same_data(read(run, alike, parallel={"dp": 2}, **corpus), "x")
    assert found is not None
    assert found.what == "same_data"
