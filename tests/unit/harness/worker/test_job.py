"""The batch script of a Slurm job, with an srun that a test makes up."""

import os
from pathlib import Path

import pytest

from harness.engine.node_reports import NodeReport, report_path
from harness.engine.slurm_job import Submission, save_submission
from harness.errors import Infrastructure
from harness.records import RankExit, dumps
from harness.worker import job
from harness.worker.job import run_job

SRUN = """#!/bin/sh
echo "$MASTER_ADDR $MASTER_PORT $*" > {folder}/srun.called
exit 3
"""
SUBMISSION = Submission(name="mine", num_nodes=1, ranks_per_node=2, submitted_unix_s=0.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder as the harness leaves it before sbatch, and an srun that takes notes."""
    folder = tmp_path / "runs" / "key"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text("{}")
    save_submission(folder, SUBMISSION)
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(folder=folder))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(job, "VISIBLE_S", 0.0)
    return folder


def called(folder: Path) -> str:
    path = folder / "srun.called"
    return path.read_text() if path.exists() else ""


def report(folder: Path, stopped_by: str = "") -> None:
    made = NodeReport(
        job="mine", restart=0, node=0, exits=(RankExit(rank=0, code=0),), failed_unix_s={},
        timed_out=False, stopped_by=stopped_by, record_bytes={}, problem="", started_unix_s=0.0,
    )  # fmt: skip
    (folder / report_path(0)).write_text(dumps(made))


def test_agents_are_started_once_a_node(folder: Path) -> None:
    """srun gets the meeting place, one task a node, and its code is that of the job."""
    assert run_job(folder, "mine", ["agent", "x"]) == 3
    address, port, *arguments = called(folder).split()
    assert (address, port.isdigit()) == ("127.0.0.1", True)
    assert {"--nodes=1", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=0"} <= set(
        arguments
    )
    assert arguments[-2:] == ["agent", "x"]
    assert (folder / "start0").is_dir()


def test_a_job_that_is_not_wanted_any_more_leaves(folder: Path) -> None:
    """Another job's folder, a cancelled submission: nothing is started, nothing touched."""
    assert run_job(folder, "another", ["agent"]) == 0
    cancelled = Submission.from_json(SUBMISSION.to_json() | {"cancelled": True})
    save_submission(folder, cancelled)
    assert run_job(folder, "mine", ["agent"]) == 0
    assert {path.name for path in folder.iterdir()} == {"spec.json", "slurm.json"}


def test_a_job_that_is_started_twice_at_once_runs_once(folder: Path) -> None:
    """A controller that was killed may start a job a second time beside the first."""
    run_job(folder, "mine", ["agent"])
    (folder / "srun.called").unlink()
    assert run_job(folder, "mine", ["agent"]) == 0
    assert called(folder) == ""


@pytest.mark.parametrize("how", ["reported", "concluded"])
def test_a_finished_run_is_not_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Started again after all was done, a job must not move the records away."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (folder / "rank0.jsonl").write_text("records")
    if how == "reported":
        report(folder)
    else:
        (folder / "outcome.json").write_text("{}")
    assert run_job(folder, "mine", ["agent"]) == 0
    assert (folder / "rank0.jsonl").read_text() == "records"
    assert called(folder) == ""


def test_what_a_stopped_start_left_is_moved_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of the first start are kept, and not appended to."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (folder / "rank0.jsonl").write_text("records")
    (folder / "rank0.stderr").write_text("words")
    # Where ranks were before would be taken for where they are when they hang.
    evidence = {"rank0.place", "nccl_rank0", "nccl_rank0.pipe", "cuda0.core"}
    for name in evidence:
        (folder / name).touch()
    report(folder, stopped_by="SIGTERM")
    assert run_job(folder, "mine", ["agent"]) == 3
    kept = {path.name for path in (folder / "restart0").iterdir()}
    assert kept == {"rank0.jsonl", "rank0.stderr", "node0.json", *evidence}
    assert not (folder / "rank0.jsonl").exists()


def test_a_folder_that_this_node_does_not_see(folder: Path, tmp_path: Path) -> None:
    """Said with what to do about it."""
    with pytest.raises(Infrastructure, match="put --out on a file system that all nodes share"):
        run_job(tmp_path / "runs" / "elsewhere", "mine", ["agent"])
