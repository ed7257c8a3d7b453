"""A slice of the fuzz with fixed seeds, and what the fuzz itself promises."""

import pytest

from tests.dist.rank_pool import RankPool
from tests.scope_fuzz.case import Case
from tests.scope_fuzz.draw import Draw
from tests.scope_fuzz.judge import Judge, refusal_of


@pytest.mark.parametrize(("seed", "world_size", "number"), [(3, 1, 3), (5, 2, 1)])
def test_random_cases_have_eagers_bits(
    seed: int, world_size: int, number: int, warm_ranks: RankPool
) -> None:
    """Graphed runs that nobody chose are their eager runs, bit for bit, and leave nothing."""
    draw = Draw(seed, (world_size,), is_small=True)
    judge = Judge(warm_ranks, timeout_s=60.0)
    while judge.ran < number:
        case = draw.case()
        verdict = judge(case)
        assert not verdict.kind, f"{verdict.text}\n{case.to_json()}"


def test_rules_refuse_with_a_key() -> None:
    """Whatever is drawn is legal, or refused by a rule or for one value: nothing else is raised."""
    draw = Draw(1, (1, 2, 4, 8))
    cases = [draw.case() for _ in range(150)]
    verdicts = [refusal_of(case) for case in cases]
    assert [refusal_of(Case.from_json(case.to_json())) for case in cases[:20]] == verdicts[:20]
    assert {verdict.kind for verdict in verdicts} == {""}
    rules = {verdict.rule for verdict in verdicts}
    assert "" in rules
    assert len(rules) > 10
