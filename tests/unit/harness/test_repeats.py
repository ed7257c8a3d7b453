"""Contracts of harness.repeats."""

import dataclasses

from harness.records import CaseSpec, RunSpec
from harness.repeats import Turns, in_turn, is_timed, runs_of, timed_pairs


def case(graph: str, repeats: int, dp: int = 1) -> CaseSpec:
    """A graph scope against eager."""

    def run(scopes: list[str], replica: int = 0) -> RunSpec:
        config = {"graph": scopes, "parallel": {"dp": dp}}
        return RunSpec(config=config, device="cpu", world_size=dp, timeout_s=1, replica=replica)

    return CaseSpec(
        id=f"dp{dp}-{graph}", scenario="s", labels={}, reference=run([]), control=run([], 1),
        candidate=run([graph]), expect="bitwise", checks={}, repeats=repeats,
    )  # fmt: skip


def names(runs: tuple[RunSpec, ...]) -> list[str]:
    """eager0, attn0, ..."""
    return [f"{(spec.config['graph'] or ['eager'])[0]}{spec.replica - 2}" for spec in runs]


def test_legs_take_turns() -> None:
    """A B, B A, A B: neighbours in time are a pair, and each leg is first as often, but for one."""
    assert names(in_turn([case("attn", 3)])) == [
        "eager0", "attn0", "attn1", "eager1", "eager2", "attn2",
    ]  # fmt: skip


def test_cases_of_one_reference_share_its_repeats() -> None:
    """Three legs go round together, every run once; cases of another reference follow."""
    cases = [case("attn", 2), case("mlp", 2, dp=2), case("layer", 2)]
    assert names(in_turn(cases)) == [
        "eager0", "attn0", "layer0", "layer1", "attn1", "eager1",
        "eager0", "mlp0", "mlp1", "eager1",
    ]  # fmt: skip
    assert len({spec.key for spec in in_turn(cases)}) == 10


def test_repeats_are_other_runs_of_the_same_work() -> None:
    """Keys of their own, that no leg or control has; nothing but the replica differs."""
    mine = case("attn", 6)
    keys = [spec.key for spec in runs_of(mine)]
    assert len(set(keys)) == len(keys) == 3 + 12
    assert [is_timed(spec) for spec in runs_of(mine)] == [False] * 3 + [True] * 12
    for reference, candidate in timed_pairs(mine):
        assert dataclasses.replace(reference, replica=0) == mine.reference
        assert dataclasses.replace(candidate, replica=0) == mine.candidate
    assert runs_of(case("attn", 0)) == runs_of(mine)[:3]


def test_a_skipped_case_has_no_turn() -> None:
    """What cannot run here is not timed here."""
    assert in_turn([dataclasses.replace(case("attn", 2), skip_reason="no GPU")]) == ()


def test_a_timed_run_waits_until_nothing_is_under_way() -> None:
    """One at a time; what is finished already has no turn."""
    mine = case("attn", 2)
    order = in_turn([mine])
    turns = Turns([mine], [spec.key for spec in order[1:]])
    assert turns.next(1) is None
    assert [turns.next(0) for _ in range(len(turns) + 1)] == [*order[1:], None]
