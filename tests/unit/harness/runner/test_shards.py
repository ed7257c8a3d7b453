"""Contracts of harness.runner.shards: every case once, balanced, the same on every machine."""

import dataclasses
import random

import pytest

from harness.errors import UsageError
from harness.records import CaseSpec, RunSpec
from harness.repeats import runs_of
from harness.runner import estimates as expectations
from harness.runner import plan
from harness.runner.estimates import expected_anywhere
from harness.runner.shards import cut, fingerprint, parse_shard, parts
from harness.store.merge import Shard


def spec(name: str, world_size: int = 1, replica: int = 0) -> RunSpec:
    return RunSpec(
        config={"name": name}, device="cpu", world_size=world_size, timeout_s=1.0, replica=replica
    )


def case(name: str, reference: str, world_size: int = 1) -> CaseSpec:
    return CaseSpec(
        id=name, scenario="s", labels={}, expect="bitwise", checks={},
        reference=spec(reference, world_size), control=spec(reference, world_size, replica=1),
        candidate=spec(name, world_size),
    )  # fmt: skip


def drawn(seed: int, num_groups: int) -> tuple[list[CaseSpec], dict[str, float]]:
    draw = random.Random(seed)
    cases = [
        case(f"c{group}.{n}", f"r{group}", width)
        for group in range(num_groups)
        for width in [draw.choice([1, 2, 4, 8])]
        for n in range(draw.randint(1, 6))
    ]
    draw.shuffle(cases)
    return cases, {s.config["name"]: draw.lognormvariate(1, 1) for c in cases for s in runs_of(c)}


@pytest.mark.parametrize("number", [1, 2, 3, 7, 40])
def test_all_shards_together_are_all_cases_once(number: int) -> None:
    """None is lost and none is twice, order is kept, and no two shards make the same run."""
    cases, takes = drawn(number, 25)
    shards = cut(cases, number, lambda s: takes[s.config["name"]])
    assert len(shards) == number
    assert sorted(c.id for held in shards for c in held) == sorted(c.id for c in cases)
    for held in shards:
        assert [c.id for c in held] == [c.id for c in cases if c in held]
    made = [{s.key for c in held for s in runs_of(c)} for held in shards]
    assert sum(map(len, made)) == len(set().union(*made))
    assert [bool(held) for held in shards].count(True) == min(number, 25)


def test_shards_are_balanced() -> None:
    """No shard costs more than 4/3 of its share, or the largest group that it may not part."""
    cases, takes = drawn(5, 60)

    def seconds(run: RunSpec) -> float:
        return takes[run.config["name"]]

    costs = [part.expected_slot_s for part in parts(cut(cases, 4, seconds), seconds)]
    groups = cut(cases, 1000, seconds)
    largest = max(part.expected_slot_s for part in parts(groups, seconds))
    assert max(costs) <= max(4 / 3 * sum(costs) / 4, largest)
    assert sum(costs) == pytest.approx(sum(p.expected_slot_s for p in parts(groups, seconds)))


def test_what_costs_nothing_is_spread_too() -> None:
    """Cases whose time is unknown, all the same, are dealt out evenly."""
    cases = [case(f"c{n}", f"r{n}") for n in range(12)]
    assert [len(held) for held in cut(cases, 4, lambda s: 0.0)] == [3, 3, 3, 3]


def test_a_candidate_that_is_another_case_s_reference_keeps_both_together() -> None:
    """Cases that share any run are one group."""
    cases = [case("b", "a"), case("x", "y"), case("c", "b")]
    shards = cut(cases, 2, lambda s: 1.0)
    assert [[c.id for c in held] for held in shards] == [["b", "c"], ["x"]]


def test_the_machine_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a history, costs are those of one stated machine, whichever cuts."""
    from tests.unit.harness.runner.test_plan import case as planned_case

    cases = [planned_case(f"c{n}", 1 + n % 4, timeout_s=float(n + 1)) for n in range(20)]
    names, costs = [], []
    for cores in (1, 64):
        for module in (expectations, plan):
            monkeypatch.setattr(module, "num_cores", lambda cores=cores: cores)
        seconds = expected_anywhere(None)
        names.append(fingerprint(cut(cases, 3, seconds)))
        costs.append([seconds(c.candidate) for c in cases])
    assert names[0] == names[1]
    assert costs[0] == costs[1]
    assert names[0] != fingerprint(cut(cases, 4, expected_anywhere(None)))
    seconds = expected_anywhere(None)
    on_gpus = [dataclasses.replace(c.candidate, device="cuda") for c in cases]
    assert [seconds(run) for run in on_gpus] == costs[0]


def test_a_shard_is_written_i_of_n() -> None:
    """What is not a shard is refused with what was expected."""
    assert parse_shard("2/4") == Shard(index=2, number=4)
    assert str(parse_shard("4/4")) == "4/4"
    for text in ("0/0", "5/4", "0/4", "1/0", "1", "a/b", "-1/2", "1/2/3", " 1/2", "1/1001", ""):
        with pytest.raises(UsageError, match="--shard"):
            parse_shard(text)
