"""The least case that still fails, for failures that are made up."""

from collections.abc import Callable
from typing import Any

from fsdp_core.config import FsdpConfig, ParallelConfig, model_from_preset
from harness.bisect.experiments import Judged, failure_of
from harness.bisect.least import LeastCase, find_least
from harness.records import CaseSpec, PlantSpec, RunSpec
from tests.unit.harness.bisect.made_up_asker import MadeUpAsker, case_of, run, verdict_of

WIDE: dict[str, Any] = {
    "model": model_from_preset("dense_tiny", {"layers": 8}), "steps": 20, "microbatches": 4,
    "micro_batch_size": 2, "parallel": ParallelConfig(dp=2, tp=2, pp=2, sequence_parallel=True),
    "stress": ("jitter", "poison"), "fsdp": FsdpConfig(pool="traced"), "flush_every": 5,
}  # fmt: skip


def least_of(
    of_case: Callable[[CaseSpec], str], *plants: PlantSpec, **options: Any
) -> tuple[LeastCase, MadeUpAsker]:
    """What is left of a wide case whose legs differ in a scope and a plant."""
    case = case_of(run(**WIDE), run(*plants, graph=("attn",), **WIDE))
    verdict = verdict_of(case, of_case(case))
    asker = MadeUpAsker(of_case=of_case, **options)
    judged = Judged(case, failure_of(verdict), asker, verdict)
    return find_least(judged, case.reference, case.candidate), asker


def _config(spec: RunSpec) -> dict[str, Any]:
    return spec.config


def test_what_needs_nothing_ends_as_the_least_legal_case() -> None:
    """One rank, one layer, one microbatch, plain settings, and no more steps than graphs need."""
    least, asker = least_of(lambda case: "diverged")
    for spec in (least.reference, least.candidate):
        config = _config(spec)
        assert spec.world_size == 1
        assert (
            config["model"]["layers"] == config["microbatches"] == config["micro_batch_size"] == 1
        )
        assert (config["steps"], config["stress"], config["fsdp"]["pool"]) == (3, [], "double")
        assert not config["parallel"]["sequence_parallel"]
    assert (least.reference.config["graph"], least.candidate.config["graph"]) == ([], ["attn"])
    assert asker.num_runs <= 8
    assert "steps 20 -> 3" in least.made


def test_each_size_is_the_least_that_fails() -> None:
    """5 layers, 7 steps, 3 microbatches and a tensor-parallel pair: not only powers of two."""

    def fails(case: CaseSpec) -> str:
        config = case.candidate.config
        needed = (
            config["model"]["layers"] >= 5, config["steps"] >= 7, config["microbatches"] >= 3,
            config["parallel"]["tp"] == 2, "poison" in config["stress"],
        )  # fmt: skip
        return "diverged" if all(needed) else ""

    least, _ = least_of(fails)
    config = least.candidate.config
    assert (config["model"]["layers"], config["steps"], config["microbatches"]) == (5, 7, 3)
    assert least.candidate.world_size == config["parallel"]["tp"] == 2
    assert config["stress"] == ["jitter", "poison"]
    assert config["fsdp"]["pool"] == "double"


def test_another_failure_is_not_taken_for_the_same() -> None:
    """A case that crashes when it gets small stays at the size at which it diverges."""

    def fails(case: CaseSpec) -> str:
        return "diverged" if case.candidate.config["model"]["layers"] == 8 else "crashed"

    least, _ = least_of(fails)
    assert least.candidate.config["model"]["layers"] == 8
    assert least.candidate.world_size == 1


def test_a_planted_fault_keeps_its_step_and_finds_a_rank() -> None:
    """Steps are not fewer than the plant needs, and a rank that is gone becomes the last."""
    least, asker = least_of(lambda case: "diverged", PlantSpec(fault="ulp", step=11, rank=5))
    assert least.candidate.config["steps"] == 12
    assert least.candidate.plant == PlantSpec(fault="ulp", step=11, rank=-1)
    assert all(asked.candidate.config["steps"] >= 12 for asked in asker.asked)


def test_both_legs_shrink_alike_and_stay_apart_in_what_they_differ_in() -> None:
    """Every question has legs of equal ranks, steps and layers; the control is the reference."""
    _, asker = least_of(lambda case: "diverged", PlantSpec(fault="ulp", step=4))
    for case in asker.asked:
        ours, theirs = case.candidate.config, case.reference.config
        assert {**ours, "graph": []} == theirs
        assert case.control == RunSpec.from_json(case.reference.to_json() | {"replica": 1})


def test_what_a_budget_cuts_off_is_the_least_case_so_far() -> None:
    """The reason is said, and what was made smaller stays."""
    least, _ = least_of(lambda case: "diverged", max_runs=1)
    assert least.made == ("steps 20 -> 3",)
    assert "budget of 1 runs" in least.stopped


def test_products_of_three_axes_say_that_fewer_ranks_pass() -> None:
    """What takes dp, tp and pp stays on eight ranks, and every product of fewer is named."""

    def fails(case: CaseSpec) -> str:
        return "diverged" if case.candidate.world_size == 8 else ""

    least, _ = least_of(fails)
    assert least.candidate.world_size == 8
    assert least.passed == (
        "one rank", "dp 2", "tp 2", "pp 2", "dp 2 tp 2", "dp 2 pp 2", "tp 2 pp 2"
    )  # fmt: skip


def test_layouts_that_fail_in_another_way_do_not_pass() -> None:
    """Fewer ranks that crash prove nothing, and are not told as passing."""
    least, _ = least_of(lambda case: "diverged" if case.candidate.world_size == 8 else "crashed")
    assert (least.candidate.world_size, least.passed) == (8, ())
