"""A slice of the fuzz with fixed seeds, and what the fuzz itself promises."""

from pathlib import Path
from typing import Any

import pytest

from fsdp_core.config import ConfigError
from harness.errors import ScenarioError
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario
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
    verdicts = [refusal_of(draw.case()) for _ in range(150)]
    assert {verdict.kind for verdict in verdicts} == {""}
    rules = {verdict.rule for verdict in verdicts}
    assert "" in rules
    assert len(rules) > 10


def test_scenarios_are_cases_for_the_harness(tmp_path: Path) -> None:
    """A printed scenario is one case whose legs are the case's runs, or refused as the case is."""
    draw, path = Draw(2, (1, 2, 4)), tmp_path / "case.yaml"
    for _ in range(20):
        case = draw.case()
        path.write_text(case.scenario())
        try:
            config = case.config()
        except ConfigError:
            with pytest.raises(ScenarioError):
                expand(load_scenario(path), "cpu")
            continue
        (spec,) = expand(load_scenario(path), "cpu")
        assert _sets(spec.candidate.config) == _sets(config.to_dict())
        assert _sets(spec.reference.config) == _sets(config.to_dict() | {"graph": []})
        assert Case.from_json(case.to_json()) == case


def _sets(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with its names sorted: a set of them has one spelling in scenarios."""
    names = {key: value for key, value in config.items() if isinstance(value, list)}
    return config | {key: sorted(value) for key, value in names.items()}
