"""The shipped planted scenarios through the real engine and worker: every fault gets its name."""

from pathlib import Path

import pytest

from harness.checks import exit_code
from harness.faults.catalogue import CATALOGUE
from harness.records import CaseSpec, ExitCode
from harness.scenario.suite import find_scenarios
from tests.planted.conftest import RunScenario

ROOT = Path(__file__).parents[2]
SCENARIOS = find_scenarios([ROOT / "scenarios/planted.yaml"])
LAYER = "model.layers=1"
CHEAPER = {
    "wrong_values": (LAYER, "parallel.dp=2", "microbatches=1", "steps=8"),
    "stale_address": (LAYER, "steps=6"),
    "lost_records": (LAYER, "steps=6"),
    "dead_ranks": (LAYER, "steps=5"),
    "rounding": (),  # a fault of its second layer
}
"""What a scenario can do without to name the same faults: ranks, layers, microbatches, steps."""
FEWER = {
    "wrong_values": ("graph=[eager, [full_iteration]]",), "missed_work": ("graph=[eager, [attn]]",),
    "rounding": ("compile=[none, [mlp]]",),
}  # fmt: skip
"""One candidate sees each fault."""


def name_of(path: Path) -> str:
    """Of a planted scenario."""
    return path.name.partition("::planted_")[2]


def planted_fault(case: CaseSpec) -> str:
    """The fault in a case's candidate, "" if there is none."""
    return case.candidate.plant.fault if case.candidate.plant else ""


@pytest.mark.parametrize("path", SCENARIOS, ids=name_of)
def test_every_fault_is_named_and_the_clean_cases_pass(
    path: Path, run_scenario: RunScenario
) -> None:
    """Each verdict names what the catalogue expects; what cannot be planted here is skipped."""
    sets, axes = CHEAPER.get(name_of(path), (LAYER,)), FEWER.get(name_of(path), ())
    judged = run_scenario(path, sets=sets, axes=axes)
    for case, verdict in judged:
        fault = planted_fault(case)
        if not fault:
            assert verdict.outcome == "passed", verdict.message
        elif "cpu" not in CATALOGUE[fault].devices:
            assert verdict.outcome == "skipped", verdict.message
        else:
            assert verdict.outcome == "failed", (fault, verdict.message)
            assert verdict.what in CATALOGUE[fault].expects, (fault, verdict.message)
    assert "" in {planted_fault(case) for case, _ in judged}
    assert exit_code([verdict for _, verdict in judged]) == ExitCode.FAILED
