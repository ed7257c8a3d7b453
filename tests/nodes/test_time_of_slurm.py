"""What Slurm takes its time for: the last of these files, about runs begun by the first."""

import pytest

from harness.engine.node_reports import read_reports
from harness.engine.slurm_job import load_submission
from harness.store import load_run_folder
from tests.nodes.conftest import Slow
from tests.nodes.local_slurm import LocalSlurm

pytestmark = pytest.mark.xdist_group("slurm")


def test_the_time_limit_of_slurm_leaves_stacks(slurm: LocalSlurm, overdue: Slow) -> None:
    """A run that outlives its job's time is a hang; each rank says where it was."""
    outcome = overdue.outcome()
    assert outcome.what == "hang", outcome.message
    assert f"Slurm job {overdue.job_id} ended as TIMEOUT" in outcome.message
    for rank in range(4):
        assert f"rank {rank} after step 1 in sleep_for_ever" in outcome.message
        assert "sleep_for_ever" in (overdue.folder / f"rank{rank}.stderr").read_text()
    assert load_run_folder(overdue.folder, overdue.run).outcome == outcome


def test_a_job_that_slurm_starts_again(slurm: LocalSlurm, requeued: Slow) -> None:
    """A requeued job makes the whole run anew; what it had written before is kept beside it."""
    outcome, folder = requeued.outcome(), requeued.folder
    assert outcome.what == "", outcome.message
    submission = load_submission(folder)
    assert submission is not None
    assert submission.job_id == requeued.job_id
    reports = read_reports(folder, submission.name, 2)
    assert [report.restart for report in reports.values()] == [1, 1]
    assert (folder / "restart0" / "rank0.jsonl").stat().st_size > 0
    assert [len(records.steps) for records in load_run_folder(folder, requeued.run).ranks] == [
        4
    ] * 4
