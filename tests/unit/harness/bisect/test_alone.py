"""From a cause to a scenario in a file, for failures that are made up."""

from pathlib import Path

import pytest

from harness.bisect.causes import find_causes
from harness.bisect.experiments import OutOfBudget
from harness.bisect.repro import leave_alone, read_back
from harness.records import CaseSpec, PlantSpec
from tests.unit.harness.bisect.made_up_asker import MadeUpAsker, case_of, run, verdict_of


def _fails(case: CaseSpec) -> str:
    """With the scope mlp and the stressor poison, from three steps on."""
    config = case.candidate.config
    both = (
        "mlp" in config["graph"]
        and "poison" in config["stress"]
        and not case.reference.config["graph"]
    )
    return "diverged" if both and config["steps"] >= 4 else ""


def test_the_scenario_holds_the_cause_and_nothing_else(tmp_path: Path) -> None:
    """Of six changes the two are left, with the least sizes, the story and the command."""
    candidate = run(
        PlantSpec(fault="ulp", step=3), graph=("attn", "mlp"), stress=("jitter", "poison"),
        ledger=False, microbatches=2,
    )  # fmt: skip
    case = case_of(run(microbatches=2), candidate)
    asker = MadeUpAsker(of_case=_fails)
    verdict = verdict_of(case, "diverged")
    causes = find_causes(case, verdict, asker)
    alone = leave_alone(case, verdict, causes, asker, folder=tmp_path, place="layers.0.mlp")
    (path,) = tmp_path.iterdir()
    assert str(alone) == f"harness run {path} (1 rank, 1 layer, 4 steps, 1 microbatch)"
    assert (alone.ranks, alone.layers, alone.steps, alone.microbatches) == (1, 1, 4, 1)
    text = path.read_text()
    assert "graph: mlp and stress: poison together. Layers.0.mlp." in " ".join(text.split())
    least = read_back(text, "cpu")
    assert _fails(least)
    assert least.candidate.config["graph"] == ["mlp"]
    assert least.candidate.config["stress"] == ["poison"]
    assert least.candidate.plant is None


def test_no_scenario_is_left_where_the_failure_is_gone(tmp_path: Path) -> None:
    """A case that passes by now has no least case, and says so."""
    case = case_of(run(), run(graph=("attn",)))
    verdict = verdict_of(case, "diverged")
    causes = find_causes(case, verdict, MadeUpAsker(of_case=lambda case: "diverged"))
    alone = leave_alone(
        case, verdict, causes, MadeUpAsker(of_case=lambda case: ""), folder=tmp_path
    )
    assert alone.path == ""
    assert alone.notes == ("the cause alone did not fail again",)
    assert not any(tmp_path.iterdir())


def test_a_budget_that_ends_leaves_no_scenario_and_says_why(tmp_path: Path) -> None:
    """Nothing is written that was not run."""
    case = case_of(run(), run(graph=("attn",)))
    verdict = verdict_of(case, "diverged")
    asker = MadeUpAsker(of_case=lambda case: "diverged", max_runs=1)
    with pytest.raises(OutOfBudget, match="budget of 1 runs"):
        leave_alone(case, verdict, None, asker, folder=tmp_path)
    assert not any(tmp_path.iterdir())
