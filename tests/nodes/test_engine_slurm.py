"""Runs on a real Slurm: two nodes by two ranks, with ranks that misbehave on purpose (no torch)."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.checks.complete import find_flaw, machine_failure
from harness.engine.slurm import SlurmEngine, SlurmOptions
from harness.errors import Infrastructure
from harness.records import ExitCode
from harness.store import RunFolder, load_run_folder
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, allocation, engine, finish, spec, until, wait_for

pytestmark = pytest.mark.xdist_group("slurm")

ROWS = {
    "all well": ({}, "", None, ""),
    "SIGKILL": ({"2": "sigkill_last"}, "killed", 2, "rank 2 died by SIGKILL after step 1"),
    "others hang": ({"3": "raise_last", "*": "hang"}, "crashed", 3, "ZeroDivisionError: planted"),
    "agent killed": (
        {"3": "kill_leader_last", "*": "hang"}, "crashed", None, "node 1 left no report",
    ),
    "time up": ({"*": "hang"}, "hang", None, "time was up after 2 s; still running: rank 0"),
    "children": ({"0": "children_then_die_last"}, "killed", 0, "SIGKILL"),
}  # fmt: skip
HANG = {"*": "hang"}


@pytest.fixture(scope="class")
def shared(cluster: LocalSlurm) -> Iterator[SlurmEngine]:
    """One engine, in one allocation, for all rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        with allocation(cluster), engine() as made:
            yield made


class TestRows:
    """All on one allocation."""

    @pytest.mark.parametrize("row", ROWS)
    def test_what_a_misbehaving_rank_is_called(
        self, shared: SlurmEngine, row: str, tmp_path: Path
    ) -> None:
        """Each way to die on one of two nodes has its own outcome and culprit, on disk too."""
        stub, what, culprit, told = ROWS[row]
        run = spec(stub, timeout_s=2.0 if row == "time up" else LIMIT_S)
        outcome = finish(shared, run, tmp_path / "run")
        assert (outcome.what, outcome.culprit_rank) == (what, culprit), outcome.message
        assert told in outcome.message
        stored = load_run_folder(tmp_path / "run", run)
        assert stored.outcome == outcome
        if row == "all well":
            seen = [records.start.environment["env"] for records in stored.ranks if records.start]
            assert [(env["RANK"], env["LOCAL_RANK"]) for env in seen] == [
                ("0", "0"), ("1", "1"), ("2", "0"), ("3", "1"),
            ]  # fmt: skip
            assert len({env["MASTER_PORT"] for env in seen}) == 1
            assert find_flaw(stored) is None


def jobs(slurm: LocalSlurm, *more: str) -> list[str]:
    """Jobs that are pending or run."""
    return slurm.call("squeue", "-h", "-o", "%A", *more).split()


ENDS: dict[str, tuple[str, Callable[[LocalSlurm, str], object]]] = {
    "CANCELLED": ("", lambda slurm, job: slurm.call("scancel", job)),
    "the step ended (CANCELLED)": ("", lambda slurm, job: slurm.call("scancel", f"{job}.0")),
    "NODE_FAIL (NodeDown": (
        "node_failure",
        lambda slurm, job: slurm.call(
            "scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=pulled"
        ),
    ),
}


@pytest.mark.parametrize("told", ENDS)
def test_what_slurm_ends_is_interrupted(slurm: LocalSlurm, tmp_path: Path, told: str) -> None:
    """With Slurm's word for it; the run after it needs an allocation that lives."""
    failure, act = ENDS[told]
    with allocation(slurm, "--nodelist=n1,n2") as job, engine() as made:
        run = spec(HANG)
        outcome = finish(made, run, tmp_path / "a", "hanging", lambda: act(slurm, job))
        assert outcome.what == "interrupted", outcome.message
        assert told in outcome.message
        assert machine_failure(load_run_folder(tmp_path / "a", run)) == failure
        slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
        if told.startswith("the step"):
            assert finish(made, spec(), tmp_path / "b").what == ""
        else:
            with pytest.raises(Infrastructure, match="--resume in another one"):
                made.start(spec(), tmp_path / "b")


def test_gpus_are_handed_out(slurm: LocalSlurm, tmp_path: Path) -> None:
    """A run on GPUs takes those of its nodes; each rank sees them all and knows its own."""
    run = spec(device="cuda")
    with allocation(slurm, "--gres=gpu:2"), engine(SlurmOptions(gpus_per_node=2)) as made:
        assert finish(made, run, tmp_path).what == ""
    ranks = load_run_folder(tmp_path, run).ranks
    seen = [records.start.environment["env"] for records in ranks if records.start]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == ["0,1"] * 4
    assert [env["LOCAL_RANK"] for env in seen] == ["0", "1", "0", "1"]


def test_a_smaller_run_is_on_the_first_nodes(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Steps begin at the first node, one at a time; a cancelled one leaves nothing."""
    small, large = spec(HANG, 1), spec(HANG)
    nodes = []
    with allocation(slurm) as job, engine() as made:
        for name, run in (("a", small), ("b", large)):
            made.start(run, tmp_path / name)
            wait_for(tmp_path / name / "hanging0")
            assert not made.can_start(large)
            nodes += slurm.call("squeue", "-h", "-s", "-o", "%N", f"-j{job}").split()
            made.cancel()
            until(lambda: not slurm.call("squeue", "-h", "-s", "-o", "%i").split(), "a step")
    one, both = (each for each in nodes)
    assert (one[:2], both) in {("n1", "n[1-2]"), ("n3", "n[3-4]")}


SCENARIO = """\
name: on_slurm
why: Graphing must not change one bit where ranks are on two nodes.
base: {model: dense_tiny, steps: 2, graph_warmup_steps: 1}
axes: {parallel: [{dp: 4}], graph: [eager, [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 300, engine: slurm, slurm: {nodes: 2}}
"""


def harness(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    around = ("salloc", "-N2", "--ntasks-per-node=1", "--cpus-per-task=2")
    command = (sys.executable, "-P", "-m", "harness", "run", *arguments, "--no-history")
    return subprocess.Popen(
        [*around, *command], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_a_scenario_ended_and_resumed(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Killed, then resumed and stopped, then resumed, each in an allocation of its own."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    steps = lambda: slurm.call("squeue", "-h", "-s", "-o", "%i").split()  # noqa: E731
    with harness(tmp_path, "s.yaml", "--out", "run") as first:
        until(steps, "no step")
        os.kill(int((tmp_path / "run" / "lock").read_text().split()[1]), signal.SIGKILL)
        first.communicate(timeout=LIMIT_S)
    until(lambda: not jobs(slurm), "the step of a killed harness")
    with harness(tmp_path, "--resume", "run") as second:
        until(steps, "no step")
        os.kill(int((tmp_path / "run" / "lock").read_text().split()[1]), signal.SIGINT)
        said = second.communicate(timeout=LIMIT_S)
    assert second.returncode == ExitCode.INTERRUPTED, said
    with harness(tmp_path, "--resume", "run") as third:
        said = third.communicate(timeout=LIMIT_S)
    assert third.returncode == ExitCode.PASSED, said
    folder = RunFolder.open(tmp_path / "run")
    (case,) = folder.cases
    result = folder.load_run(case.candidate)
    found = [rec.start.environment["fingerprint"] for rec in result.ranks if rec.start]
    assert [fingerprint["ranks_on_node"] for fingerprint in found] == ["2"] * 4
    assert jobs(slurm) == []
