"""Runs on a real Slurm: two nodes by two ranks, with ranks that misbehave on purpose (no torch)."""

from pathlib import Path

import pytest

from harness.engine.node_reports import read_reports
from harness.engine.slurm_job import SlurmOptions, load_submission
from harness.records import RunOutcome, RunResult
from harness.store import load_run_folder
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, engine, finish, spec

pytestmark = pytest.mark.xdist_group("slurm")

ROWS = {
    "all well": ({}, "", None, ""),
    "SIGKILL": ({"2": "sigkill_last"}, "killed", 2, "rank 2 died by SIGKILL after step 1"),
    "others hang": ({"3": "raise_last", "*": "hang"}, "crashed", 3, "ZeroDivisionError: planted"),
    "agent killed": (
        {"3": "kill_leader_last", "*": "hang"},
        "crashed",
        None,
        "node 1 left no report",
    ),
    # How far ranks come in that time is the machine's affair; their stacks are `overdue`'s.
    "time up": ({"*": "hang"}, "hang", None, "time was up after 2 s; still running: rank 0"),
    "children": ({"0": "children_then_die_last"}, "killed", 0, "SIGKILL"),
}


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each row has its run folder."""
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def results(
    cluster: LocalSlurm, overdue: object, requeued: object, rows_folder: Path
) -> dict[str, tuple[RunOutcome, RunResult]]:
    """Every row on the cluster at the same time."""
    folder = rows_folder
    with pytest.MonkeyPatch.context() as patch, engine() as slurm_engine:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        specs = {}
        for row, (stub, *_) in ROWS.items():
            specs[row] = spec(stub, timeout_s=2.0 if row == "time up" else LIMIT_S)
            slurm_engine.start(specs[row], folder / row)
        found: dict[str, RunOutcome] = {}
        while len(found) < len(ROWS):
            ended = slurm_engine.wait(LIMIT_S)
            assert ended, f"no end in sight of {set(ROWS) - set(found)}"
            found |= {outcome.key: outcome for outcome in ended}
    return {row: (found[specs[row].key], load_run_folder(folder / row, specs[row])) for row in ROWS}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_misbehaving_rank_is_called(
    results: dict[str, tuple[RunOutcome, RunResult]], row: str
) -> None:
    """Each way to die on one of two nodes has its own outcome and culprit, on disk too."""
    _, what, culprit, told = ROWS[row]
    outcome, stored = results[row]
    assert (outcome.what, outcome.culprit_rank) == (what, culprit), outcome.message
    assert told in outcome.message
    assert stored.outcome == outcome


def test_a_failure_on_one_node_ends_the_ranks_of_the_other(
    results: dict[str, tuple[RunOutcome, RunResult]], rows_folder: Path
) -> None:
    """Ranks that hang on the other node are stopped at once, not when their time is up."""
    folder = rows_folder / "others hang"
    submission = load_submission(folder)
    assert submission is not None
    reports = read_reports(folder, submission.name, 2)
    assert [(report.stopped_by, report.timed_out) for report in reports.values()] == [
        ("SIGTERM", False), ("", False),
    ]  # fmt: skip


def test_ranks_of_two_nodes(results: dict[str, tuple[RunOutcome, RunResult]]) -> None:
    """Two nodes of two ranks each: local ranks, one meeting place, exits and records of all."""
    _, stored = results["all well"]
    assert [state.code for state in stored.outcome.ranks] == [0, 0, 0, 0]
    seen = [records.start.environment["env"] for records in stored.ranks if records.start]
    assert [env["LOCAL_RANK"] for env in seen] == ["0", "1", "0", "1"]
    assert [env["RANK"] for env in seen] == ["0", "1", "2", "3"]
    assert len({env["MASTER_PORT"] for env in seen}) == 1
    assert all(records.end for records in stored.ranks)


def test_gpus_are_asked_for_and_handed_out(slurm: LocalSlurm, tmp_path: Path) -> None:
    """A run on GPUs takes those of its nodes; each rank sees them all and knows its own."""
    run = spec(device="cuda")
    with engine(SlurmOptions(gpus_per_node=2)) as slurm_engine:
        slurm_engine.check(run)
        slurm_engine.start(run, tmp_path)
        (outcome,) = slurm_engine.wait(LIMIT_S)
    assert outcome.what == "", outcome.message
    ranks = load_run_folder(tmp_path, run).ranks
    seen = [records.start.environment["env"] for records in ranks if records.start]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == ["0,1"] * 4
    assert [env["LOCAL_RANK"] for env in seen] == ["0", "1", "0", "1"]


def nodes_of(folder: Path) -> set[str]:
    """Of a run's job, as its agents tell."""
    submission = load_submission(folder)
    assert submission is not None
    reports = read_reports(folder, submission.name, submission.num_nodes)
    return {report.nodes for report in reports.values()}


def test_a_candidate_waits_for_its_reference_and_gets_its_nodes(
    slurm: LocalSlurm, tmp_path: Path
) -> None:
    """Slurm hears of it once the reference has ended, whose nodes are not those it would choose."""
    reference, candidate = spec(name="reference"), spec(name="candidate")
    first, second = (tmp_path / run.key for run in (reference, candidate))
    references = {candidate.key: reference.key}
    with engine(references=references) as slurm_engine:
        slurm_engine.start(reference, first)
        slurm_engine.start(candidate, second)
        (outcome,) = slurm_engine.wait(LIMIT_S)
        assert (outcome.key, load_submission(second)) == (reference.key, None)
        (outcome,) = slurm_engine.wait(LIMIT_S)
        assert (outcome.key, outcome.what) == (candidate.key, "")
    assert nodes_of(first) == nodes_of(second)
    first, second = (tmp_path / "elsewhere" / run.key for run in (reference, candidate))
    with engine(SlurmOptions(nodes=2, args=("--exclude=n1,n2",))) as slurm_engine:
        finish(slurm_engine, reference, first)
    with engine(references=references) as slurm_engine:
        finish(slurm_engine, candidate, second)
    assert nodes_of(first) == nodes_of(second) == {"n[3-4]"}


def test_held_runs_are_cancelled_without_a_trace(slurm: LocalSlurm, tmp_path: Path) -> None:
    """What Slurm has not heard of leaves no attempt behind; a later attempt waits for nobody."""
    reference, candidate = spec({"*": "hang"}, name="reference"), spec(name="candidate")
    with engine(references={candidate.key: reference.key}) as slurm_engine:
        slurm_engine.start(reference, tmp_path / reference.key)
        slurm_engine.start(candidate, tmp_path / candidate.key)
        slurm_engine.cancel()
        assert not (tmp_path / candidate.key).exists()
        slurm_engine.start(reference, tmp_path / "again")
        slurm_engine.start(candidate, tmp_path / candidate.key, attempt=1)
        (outcome,) = slurm_engine.wait(LIMIT_S)
    assert (outcome.key, outcome.what) == (candidate.key, "")
