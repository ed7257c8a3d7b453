"""Scenarios that fail alone: written, decoded again, asked, and never over another."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_core.config import FsdpConfig, ParallelConfig, model_from_preset
from harness.bisect.experiments import Failure, Judged
from harness.bisect.repro import Repro, find_repro, read_back, scenarios, write_repro
from harness.records import CaseSpec, PlantSpec, RunSpec
from tests.unit.harness.bisect.made_up_asker import MadeUpAsker, case_of, run

DIVERGED = Failure(outcome="failed", what="diverged")
ULP, NAN = PlantSpec(fault="ulp", step=3), PlantSpec(fault="nan", step=4, rank=0, chance=0.3)


def repro_of(reference: RunSpec, candidate: RunSpec, **options: Any) -> Repro:
    """What is written for two legs."""
    case = case_of(reference, candidate)
    asker = MadeUpAsker(**(options or {"of_case": lambda case: "diverged"}))
    judged = Judged(case, DIVERGED, asker)
    return find_repro(case, judged, reference, candidate, story="Because.")


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"graph": ("attn",)}), ({"stress": ("races",)}, {"stress": ("jitter", "races")}),
     ({}, {"fsdp": FsdpConfig(pool="traced", reshard_after_forward=False)}),
     ({"ledger": True}, {"ledger": False}), ({}, {"flush_every": 3}),
     ({}, {"parallel": ParallelConfig(tp=2)})],
)  # fmt: skip
def test_legs_that_differ_on_one_axis_are_the_legs_of_the_scenario(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The case that is read back has just the runs that were asked for."""
    model = model_from_preset("dense_tiny", {"layers": 3, "ffn": 96})
    shared = {"model": model, "microbatches": 2, "dtype": "fp32", "steps": 4}
    reference, candidate = run(**(shared | before)), run(**(shared | after))
    repro = repro_of(reference, candidate)
    assert repro.case is not None
    assert repro.case.reference.config == reference.config
    assert repro.case.candidate.config == candidate.config


@pytest.mark.parametrize("graph", [(), ("attn",)])
@pytest.mark.parametrize("plants", [(ULP,), (ULP, NAN)])
def test_planted_faults_are_planted_again(
    plants: tuple[PlantSpec, ...], graph: tuple[str, ...]
) -> None:
    """One or two, with chance, rank and step, beside another difference or alone."""
    candidate = run(*plants, graph=graph)
    repro = repro_of(run(), candidate)
    assert repro.case is not None
    assert repro.case.candidate.plant == candidate.plant
    assert repro.case.reference.plant is None


def test_a_fault_with_a_counterpart_is_compared_with_it() -> None:
    """The decoder plants the counterpart by itself, as it did at first."""
    reference = run(PlantSpec(fault="positive_zero", step=3, legs=("reference",)))
    candidate = run(PlantSpec(fault="negative_zero", step=3))
    repro = repro_of(reference, candidate)
    assert repro.case is not None
    assert repro.case.candidate == candidate
    assert repro.case.reference.plant == reference.plant


def test_the_axis_that_shows_the_failure_is_found_by_asking() -> None:
    """Where it only fails with the stressor compared, that scenario is the one that is kept."""

    def fails(case: CaseSpec) -> str:
        return "diverged" if not case.reference.config["stress"] else ""

    candidate = run(graph=("attn",), stress=("poison",))
    repro = repro_of(run(), candidate, of_case=fails)
    assert yaml.safe_load(repro.text)["compare"]["axis"] == "stress"


def test_a_scenario_that_does_not_fail_is_no_repro() -> None:
    """Each that was tried is told, and none is given."""
    repro = repro_of(run(), run(graph=("attn",), stress=("poison",)), of_case=lambda case: "")
    assert (repro.text, repro.case) == ("", None)
    assert repro.why_not == ("graph compared: passes", "stress compared: passes")


def test_no_file_is_written_over_another(tmp_path: Path) -> None:
    """A second one of the same name gets a number, and both can be read back."""
    repro = repro_of(run(), run(graph=("attn",)))
    paths = [write_repro(repro, tmp_path / "repro") for _ in range(3)]
    assert [path.name for path in paths] == [
        f"repro_made_up_dp2_attn{number}.yaml" for number in ("", "-2", "-3")
    ]
    assert all(read_back(path.read_text(), "cpu") == repro.case for path in paths)


@pytest.mark.parametrize(
    ("folder", "is_there", "seen"),
    [("scenarios/repro", False, False), ("scenarios/repro", True, True), ("mine", False, True)],
)
def test_git_ignores_what_a_search_leaves_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, is_there: bool, seen: bool
) -> None:
    """The folder of its own choice, when it makes it; not one that was there, or was named."""
    monkeypatch.chdir(tmp_path)
    if is_there:
        Path(folder).mkdir(parents=True)
    git = ["git", "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "-q"], check=True)
    write_repro(repro_of(run(), run(graph=("attn",))), Path(folder))
    status = subprocess.run(
        [*git, "status", "--porcelain", "-uall"], check=True, capture_output=True, text=True
    ).stdout
    assert (f"{folder}/repro_made_up_dp2_attn.yaml" in status) == seen
    assert bool(status) == seen


def test_long_names_and_stories_are_cut_to_what_a_scenario_may_hold() -> None:
    """Whatever the case is called, the text decodes."""
    reference, candidate = run(), run(graph=("attn",))
    case = CaseSpec.from_json(case_of(reference, candidate).to_json() | {"id": "x-+=" * 40})
    (text,) = scenarios(case, reference, candidate, story="A long story. " * 200)
    assert read_back(text, "cpu").candidate.config == candidate.config
