"""A harness that dies, is stopped, or finds its jobs again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.engine.slurm_job import SlurmOptions, load_submission, save_submission
from harness.errors import UsageError
from harness.records import CaseSpec, ExitCode
from harness.store import RunFolder, begin_run
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, engine, job_id_of, spec, wait_for

pytestmark = pytest.mark.xdist_group("slurm")

HARNESS = """
import sys
from pathlib import Path
from harness.errors import HarnessError
from harness.runner.run import execute
from harness.store import RunFolder
from tests.nodes.runs import engine

class Silence:
    def run_started(self, spec): pass
    def run_finished(self, outcome): pass
    def judged(self, verdict): pass

folder = RunFolder.open(Path(sys.argv[1]))
with engine() as slurm_engine:
    try:
        execute(folder, folder.cases, slurm_engine, Silence())
    except HarnessError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""
RUNS = (spec(name="ref"), spec(name="ref", replica=1), spec({"*": "await_go"}, name="slow"))
SLOW = RUNS[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with one case, whose candidate waits for a sign."""
    case = CaseSpec(
        id="slow", scenario="s", labels={}, reference=RUNS[0], control=RUNS[1], candidate=SLOW,
        expect="bitwise", checks={"loss": {}},
    )  # fmt: skip
    made = RunFolder.create(tmp_path / "out", {}, "", [case])
    made.release()
    return made


def harness(folder: RunFolder) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(folder.path)], env=environment, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip


def until_slow_waits(folder: RunFolder) -> None:
    """Until the references are finished and the candidate's ranks wait."""
    slow = folder.run_folder(SLOW.key)
    wait_for(
        *(slow / f"waiting{rank}" for rank in range(4)),
        *(folder.run_folder(run.key) / "outcome.json" for run in RUNS[:2]),
    )


def jobs(slurm: LocalSlurm, key: str) -> list[str]:
    """State of each job that there ever was for a run, as squeue has it."""
    text = slurm.call("squeue", "-h", "-t", "all", "-o", "%T %j")
    return [line.split()[0] for line in text.splitlines() if f"-{key}-" in line]


def test_a_killed_harness_finds_its_jobs_again(slurm: LocalSlurm, folder: RunFolder) -> None:
    """Killed with SIGKILL and resumed: its jobs go on, and nothing is submitted twice."""
    before = {run.key: jobs(slurm, run.key) for run in RUNS}
    with harness(folder) as first:
        until_slow_waits(folder)
        first.kill()
    assert folder.finished(SLOW.key) is None
    slow = folder.run_folder(SLOW.key)
    job_id = job_id_of(slow)
    with harness(folder) as second:
        (slow / "go").touch()
        told = second.communicate(timeout=LIMIT_S)[0]
    assert second.returncode == ExitCode.PASSED, told
    assert job_id_of(slow) == job_id
    assert folder.num_attempts(SLOW.key) == 0
    for run in RUNS:
        assert len(jobs(slurm, run.key)) == len(before[run.key]) + 1


def test_ctrl_c_cancels_the_jobs(slurm: LocalSlurm, folder: RunFolder) -> None:
    """SIGINT cancels every job, says how to go on, and what is resumed is a job of its own."""
    with harness(folder) as first:
        until_slow_waits(folder)
        first.send_signal(signal.SIGINT)
        told = first.communicate(timeout=LIMIT_S)[0]
    assert first.returncode == ExitCode.INTERRUPTED
    assert "0 of 1 cases are done; go on with --resume" in told
    assert set(jobs(slurm, SLOW.key)) <= {"CANCELLED", "COMPLETED"}
    cancelled = job_id_of(folder.run_folder(SLOW.key))
    with engine() as slurm_engine:
        assert not slurm_engine.adopt(SLOW, folder.run_folder(SLOW.key))
        folder.set_aside(SLOW.key)
        slurm_engine.start(SLOW, folder.run_folder(SLOW.key), attempt=1)
        assert job_id_of(folder.run_folder(SLOW.key)) > cancelled
        (folder.run_folder(SLOW.key) / "go").touch()
        (outcome,) = slurm_engine.wait(LIMIT_S)
    assert (outcome.what, outcome.attempt) == ("", 1)


def test_a_run_that_ended_while_nobody_watched_is_taken_over(
    slurm: LocalSlurm, tmp_path: Path
) -> None:
    """What a job finished after its harness died is concluded from its files."""
    # Not before all have begun: an agent that is told to stop as it starts leaves no report.
    run, dead = spec({"1": "exit13_last"}, name="alone"), engine()
    dead.start(run, tmp_path)
    wait_for(tmp_path / "node0.json", tmp_path / "node1.json")
    with engine() as slurm_engine:
        assert slurm_engine.adopt(run, tmp_path)
        (outcome,) = slurm_engine.wait(LIMIT_S)
    assert (outcome.what, outcome.culprit_rank) == ("crashed", 1)


def test_a_job_that_starts_too_late_leaves_the_folder_alone(
    slurm: LocalSlurm, tmp_path: Path
) -> None:
    """A job whose folder was given to another, or that was cancelled meanwhile, touches nothing."""
    held = engine(SlurmOptions(nodes=2, args=("--hold",)))
    run = spec(name="held")
    held.start(run, tmp_path)
    submission, job_id = load_submission(tmp_path), job_id_of(tmp_path)
    assert submission is not None
    stranger = submission.to_json() | {"name": "another", "job_id": None}
    save_submission(tmp_path, type(submission).from_json(stranger))
    slurm.call("scontrol", "release", str(job_id))
    until = time.monotonic() + LIMIT_S
    while slurm.call("squeue", "-h", "-j", str(job_id), "-t", "PD,R,CG", "-o", "%T").strip():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert "no longer that of job" in (tmp_path / "job.log").read_text()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"slurm.json", "spec.json", "job.log"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (SlurmOptions(partition="nowhere"), "invalid partition specified: nowhere"),
        (SlurmOptions(nodes=4, ranks_per_node=1, cpus_per_rank=99), "not available"),
        (SlurmOptions(args=("--no-such-option",)), "no-such-option"),
    ],
)
def test_what_slurm_refuses_is_a_mistake_of_usage(
    slurm: LocalSlurm, options: SlurmOptions, told: str
) -> None:
    """What Slurm would never start is said in one line before anything is submitted."""
    with engine(options) as slurm_engine, pytest.raises(UsageError, match=told) as refused:
        slurm_engine.check(spec())
    assert "\n" not in str(refused.value)


def test_a_refused_submission_leaves_nothing_under_way(slurm: LocalSlurm, tmp_path: Path) -> None:
    """What sbatch refuses at the submission itself is said too, and takes no room."""
    with engine(SlurmOptions(partition="nowhere"), jobs=1) as slurm_engine:
        with pytest.raises(UsageError, match="invalid partition specified: nowhere"):
            slurm_engine.start(spec(), tmp_path)
        assert slurm_engine.can_start(spec())
        assert slurm_engine.wait(0.0) == []


def test_a_folder_that_no_job_wrote_is_not_adopted(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Without a submission there is nothing to go on with."""
    begin_run(tmp_path, spec())
    with engine() as slurm_engine:
        assert not slurm_engine.adopt(spec(), tmp_path)
