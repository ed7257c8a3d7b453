"""Workers of pytest-xdist share one engine: slots, runs, and what becomes of a killed worker."""

import json
from pathlib import Path

import pytest

from harness.records import CaseSpec, RunSpec
from harness.store import RunFolder
from tests.unit.harness.under_pytest import crowded_ranks
from tests.unit.harness.under_pytest.test_plugin import FAULT, SCENARIO

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[4]
SLOTS = 3
CONFTEST = """
import functools, os
from pathlib import Path
import pytest
from harness.engine.local import LocalEngine
from harness.under_pytest import session
from harness.under_pytest.service import CaseService

def engine(prepared):
    entry = "tests.unit.harness.under_pytest.crowded_ranks:rank_main"
    return LocalEngine(prepared.plan.slots, entry=entry)

session.CaseService = functools.partial(CaseService, make_engine=engine)

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    Path(f"{item.name}.pid").write_text(str(os.getpid()))
"""
AXES = {
    "parallel": [{"dp": 1}, {"dp": SLOTS}],
    "plant": ["none", {"fault": "ulp", "step": 1, "rank": "last"}],
    "stress": ["none", ["jitter"], ["poison"]],
}


@pytest.fixture
def done(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.RunResult:
    """Four workers on eight cases that share three slots; one of the workers is killed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    (pytester.path / "a.yaml").write_text(json.dumps(SCENARIO | {"axes": AXES}))
    return pytester.runpytest_subprocess(
        "-p", "harness.under_pytest.plugin", "-p", "no:cov", "-p", "no:hypothesispytest",
        "--harness", "--harness-slots", str(SLOTS), "--harness-out", "kept", "-n", "4", "a.yaml",
    )  # fmt: skip


def interval(folder: RunFolder, spec: RunSpec) -> tuple[float, float, int]:
    """When the first rank came and the last one left, in seconds, and how many ranks there were."""
    path = folder.run_folder(spec.key)
    ranks = folder.load_run(spec).ranks
    came = [records.start.environment["unix_s"] for records in ranks if records.start]
    left = [float(file.read_text()) for file in path.glob(f"{crowded_ranks.LEFT_FILE}*")]
    assert len(came) == len(left) == spec.world_size
    return min(came), max(left), spec.world_size


def test_workers_share_slots_and_runs_and_a_killed_one_takes_nothing_with_it(
    done: pytest.RunResult, pytester: pytest.Pytester
) -> None:
    """By the runs' own clocks no more ranks ran than there are slots, wide runs had their turn,
    each run was made once, and the cases of the other workers have their verdicts."""
    done.assert_outcomes(passed=4, failed=4)
    done.stdout.fnmatch_lines([f"*crashed while running 'a.yaml::{crowded_ranks.KILLED}'*"])
    folder = RunFolder.open(pytester.path / "kept/a")
    cases: tuple[CaseSpec, ...] = folder.cases
    assert len(cases) == 8
    outcomes = {verdict.case_id: verdict.outcome for verdict in folder.verdicts()}
    told = {case.id: "failed" if FAULT in case.id else "passed" for case in cases}
    assert {**told, **outcomes} == told
    assert set(told) - set(outcomes) <= {crowded_ranks.KILLED}
    runs = {s.key: s for case in cases for s in (case.reference, case.control, case.candidate)}
    assert {path.name for path in folder.path.glob("runs/*")} == set(runs)
    # Nobody waits for the run whose worker was killed: it may still be under way.
    forsaken = {case.candidate.key for case in cases if case.id == crowded_ranks.KILLED}
    taken = [interval(folder, spec) for key, spec in runs.items() if key not in forsaken]
    at_a_time = [
        (sum(ranks for came, left, ranks in taken if came <= moment < left),
         sum(came <= moment < left for came, left, _ in taken))
        for moment, _, _ in taken
    ]  # fmt: skip
    assert max(ranks for ranks, _ in at_a_time) == SLOTS
    assert max(number for _, number in at_a_time) > 1
