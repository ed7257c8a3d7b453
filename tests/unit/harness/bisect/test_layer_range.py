"""The layers that must be captured, for failures that are made up."""

from collections.abc import Callable

import pytest

from fsdp_core.config import ParallelConfig, model_from_preset
from harness.bisect.causes import find_causes
from harness.bisect.experiments import Budget, OutOfBudget
from harness.bisect.least import LayerRange, find_layer_range
from harness.records import CaseSpec, PlantSpec
from tests.unit.harness.bisect.made_up_asker import MadeUpAsker, case_of, run, verdict_of

NUM_LAYERS = 16
MODEL = model_from_preset("dense_tiny", {"layers": NUM_LAYERS})
Fails = Callable[[range], bool]


def range_of(
    fails: Fails, graph: tuple[str, ...] = ("attn",), pp: int = 1, chance: float = 1.0
) -> tuple[LayerRange | None, MadeUpAsker]:
    """What is found for a case that fails with some layers captured."""

    def of_case(case: CaseSpec) -> str:
        config = case.candidate.config
        if not config["graph"]:
            return ""
        first, last = config["graph_layers"] or (0, NUM_LAYERS - 1)
        return "diverged" if fails(range(first, last + 1)) else ""

    legs = {"model": MODEL, "parallel": ParallelConfig(dp=2, pp=pp)}
    case = case_of(run(**legs), run(graph=graph, **legs))
    verdict = verdict_of(case, "diverged")
    asker = MadeUpAsker(of_case=of_case, chance=chance)
    causes = find_causes(case, verdict, asker)
    before = asker.num_runs
    found = find_layer_range(case, verdict, causes, asker)
    asker.num_runs -= before
    return found, asker


@pytest.mark.parametrize("layer", [0, 1, 7, 15])
def test_a_fault_of_one_layer_is_found_in_few_runs(layer: int) -> None:
    """That layer alone, after at most twice log2 of the layers and a few questions."""
    found, asker = range_of(lambda captured: layer in captured)
    assert found == LayerRange(first=layer, last=layer, num_layers=NUM_LAYERS, scopes=("attn",))
    assert asker.num_runs <= 2 * 4 + 4
    assert str(found) == f"fails with attn captured in layer {layer} alone, of 16"


def test_a_fault_of_two_layers_has_both_in_its_range() -> None:
    """No layer of its ends can be left out."""
    found, _ = range_of(lambda captured: 3 in captured and 9 in captured)
    assert found is not None
    assert (found.first, found.last) == (3, 9)
    assert str(found) == "fails with attn captured in layers 3 to 9, of 16"


def test_a_fault_that_takes_every_layer_says_so() -> None:
    """A fault of how many graphs there are, and not of a layer."""
    found, _ = range_of(lambda captured: len(captured) == NUM_LAYERS)
    assert str(found) == "fails only with attn captured in all 16 layers"


def test_the_range_was_seen_to_fail_whatever_the_rule() -> None:
    """Also where more captured layers hide the fault."""

    def fails(captured: range) -> bool:
        return len(captured) in (16, 5) and 6 in captured

    found, _ = range_of(fails)
    assert found is not None
    assert fails(range(found.first, found.last + 1))


@pytest.mark.parametrize(("graph", "pp"), [(("full_iteration",), 1), (("attn",), 2)])
def test_what_has_no_range_of_layers_is_not_asked(graph: tuple[str, ...], pp: int) -> None:
    """A whole step holds all layers, and a stage without graphs would replay nothing."""
    found, asker = range_of(lambda captured: True, graph, pp)
    assert found is None
    assert asker.num_runs == 0


def test_a_cause_that_is_no_capture_has_no_range() -> None:
    """A fault that needs no graph is in no captured layer."""
    case = case_of(run(model=MODEL), run(PlantSpec(fault="ulp", step=3), model=MODEL))
    verdict = verdict_of(case, "diverged")
    asker = MadeUpAsker(of_case=lambda case: "diverged" if case.candidate.plant else "")
    causes = find_causes(case, verdict, asker)
    assert find_layer_range(case, verdict, causes, asker) is None


def test_a_fault_that_fires_now_and_then_is_asked_often_enough() -> None:
    """30 % of runs: the layer is right, and passes are repeated."""
    found, asker = range_of(lambda captured: 5 in captured, chance=0.3)
    assert found is not None
    assert (found.first, found.last) == (5, 5)
    assert asker.num_runs > 20


def test_a_budget_that_ends_says_so() -> None:
    """Nothing is claimed of a search that was cut off."""
    case = case_of(run(model=MODEL), run(graph=("attn",), model=MODEL))
    verdict = verdict_of(case, "diverged")
    asker = MadeUpAsker(of_case=lambda case: "diverged" if case.candidate.config["graph"] else "")
    causes = find_causes(case, verdict, asker)
    asker.questions.budget = Budget(runs=0)
    with pytest.raises(OutOfBudget):
        find_layer_range(case, verdict, causes, asker)
