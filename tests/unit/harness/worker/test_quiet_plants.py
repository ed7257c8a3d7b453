"""Planted faults that no exception tells of: each changes what it says, there and then."""

import dataclasses
import types
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import pytest

from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Kind
from harness.records import DIGEST_GROUPS, PlantSpec, Record, StartRecord, StepRecord
from harness.worker.plants import PLANTINGS
from harness.worker.plants.planting import Planting
from harness.worker.plants.seams import wrap
from tests.unit.harness.worker.conftest import TINY, Rank, run_spec

STEP = 3
DOWN = "layers.1.mlp.mlp.down.weight"

Seen = tuple[int, str, list[str]]
"""Step, group of digests, names of tensors."""


def first_difference(ours: list[Record], theirs: list[Record]) -> Seen | None:
    """The first digests that two runs of a rank do not share."""
    start = theirs[0]
    assert isinstance(start, StartRecord)
    for mine, other in zip(ours, theirs, strict=True):
        if not isinstance(mine, StepRecord) or not isinstance(other, StepRecord):
            continue
        for group in DIGEST_GROUPS:
            names = start.tensors[group]
            a, b = mine.digests[group], other.digests[group]
            wrong = [n for i, n in enumerate(names) if a[32 * i :][:32] != b[32 * i :][:32]]
            if wrong:
                return other.step, group, wrong
    return None


def without_events(records: list[Record]) -> list[Record]:
    """Start, steps and end, which every run has as many of."""
    return [record for record in records if record.kind != "event"]


@pytest.fixture
def planted(rank: Rank) -> Callable[..., Seen | None]:
    """`planted(fault, **options)`: how a run with it first differs from one without."""

    def run(fault: str, **options: Any) -> Seen | None:
        clean = rank.run(run_spec(**options))
        faulty = rank.run(run_spec(PlantSpec(fault=fault, step=STEP), **options))
        return first_difference(without_events(faulty), without_events(clean))

    return run


@pytest.mark.parametrize(
    ("fault", "group", "wrong"),
    [
        ("gradient_rows_swapped", "grads", [DOWN]),
        ("gradient_row_negated", "grads", [DOWN]),
        ("gradient_ulp", "grads", [DOWN]),
        ("exchanged_moments", "weights", [DOWN]),
        ("decayed_norms", "weights", None),
    ],
)
def test_a_fault_of_one_tensor_shows_there_in_its_step(
    planted: Callable[..., Seen | None], fault: str, group: str, wrong: list[str] | None
) -> None:
    """Steps before are the same; in it the tensors that the catalogue means differ, no others."""
    names = wrong or [
        f"layers.{layer}.{branch}.norm.weight" for layer in (0, 1) for branch in ("attn", "mlp")
    ]
    seen = planted(fault)
    assert seen is not None
    assert seen[:2] == (STEP, group)
    assert set(seen[2]) >= set(names)
    assert set(seen[2]) - set(names) <= ({"norm.weight"} if wrong is None else set())


def test_masks_of_a_new_seed_show_in_their_step(planted: Callable[..., Seen | None]) -> None:
    """A generator that is seeded anew gives other masks at once, and what they are made of."""
    seen = planted("repeated_masks", model=dataclasses.replace(TINY, dropout=0.5))
    assert seen is not None
    assert seen[:2] == (STEP, "grads")


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_fault_of_the_catalogue_is_planted(kind: str) -> None:
    """What the catalogue lists of a kind can be planted, and what can be planted is listed."""
    listed = {fault.name for fault in import_module(f"harness.faults.{kind}").FAULTS}
    assert set(import_module(f"harness.worker.plants.{kind}").PLANTINGS) == listed


def test_no_fault_is_planted_in_two_ways() -> None:
    """Kinds share no names: all of their plantings together are the catalogue's."""
    assert set(PLANTINGS) == set(CATALOGUE)


def test_every_planting_does_something() -> None:
    """None is empty: a fault that is planted and does nothing would pass for one that is missed."""
    assert [name for name, planting in PLANTINGS.items() if planting == Planting()] == []


@dataclasses.dataclass(frozen=True)
class _Frozen:
    """What nobody may assign to."""

    number: int = 1


@pytest.mark.parametrize("owner", [_Frozen(), types.SimpleNamespace(number=1), ModuleType("m")])
def test_an_attribute_is_wrapped_wherever_it_is(owner: Any) -> None:
    """Frozen objects, plain ones and modules have what was made of the attribute."""
    vars(owner)["number"] = 1
    wrap(owner, "number", lambda number: number + 1)
    assert owner.number == 2
