"""The scenarios for 8 GPUs hold what was promised: layouts, scopes, backends, steps, ranks."""

from pathlib import Path

import pytest

from fsdp_core.config.scopes import SCOPES
from harness.records import CaseSpec
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario

NIGHTLY = Path(__file__).parents[4] / "scenarios/nightly"
NAMES = ("alignment_of_8_moe", "alignment_of_8_dense")


@pytest.fixture(scope="module")
def cases() -> list[CaseSpec]:
    """Every case of both scenarios of alignment."""
    return [
        case for name in NAMES for case in expand(load_scenario(NIGHTLY / f"{name}.yaml"), "cuda")
    ]


def test_every_layout_is_there_under_both_backends(cases: list[CaseSpec]) -> None:
    """DP8, TP2 x DP4, EP2 x ETP2, both with TP2, EP8, CP8, dynamic CP 1/2/4/8, TP2 x PP2 x DP2."""
    degrees = ("dp", "tp", "ep", "etp", "cp", "pp")
    found = {
        (
            *(case.candidate.config["parallel"][name] for name in degrees),
            tuple(case.candidate.config["parallel"]["dynamic_cp"]),
            case.candidate.config["backend"],
        )
        for case in cases
        if case.candidate.config["model"]["experts"]
    }
    layouts = {
        (8, 1, 1, 1, 1, 1, ()), (4, 2, 1, 2, 1, 1, ()), (8, 1, 2, 2, 1, 1, ()),
        (4, 2, 2, 2, 1, 1, ()), (8, 1, 8, 1, 1, 1, ()), (1, 1, 1, 1, 8, 1, ()),
        (8, 1, 1, 1, 1, 1, (1, 2, 4, 8)), (2, 2, 1, 2, 1, 2, ()),
    }  # fmt: skip
    assert found == {(*layout, backend) for layout in layouts for backend in ("torch", "te")}


def test_every_scope_is_there_under_both_backends(cases: list[CaseSpec]) -> None:
    """Each scope of the project, in some combination."""
    found = {
        (scope, case.candidate.config["backend"])
        for case in cases
        for scope in case.candidate.config["graph"]
    }
    assert found == {(scope, backend) for scope in SCOPES for backend in ("torch", "te")}


def test_each_case_is_a_hundred_steps_of_8_ranks_against_eager(cases: list[CaseSpec]) -> None:
    """Bits of loss and state, finite values and peak memory are asked of every one."""
    assert len(cases) == 190
    for case in cases:
        assert case.candidate.world_size == 8
        assert case.candidate.config["steps"] == 100
        assert case.reference.config["graph"] == []
        assert {"loss", "state", "finite", "peak_memory"} <= set(case.checks)
