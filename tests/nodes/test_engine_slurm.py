"""Runs on a real Slurm: two nodes by two ranks, with ranks that misbehave on purpose (no torch)."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.checks.complete import find_flaw
from harness.engine.slurm import SlurmEngine, SlurmOptions
from harness.errors import Infrastructure, UsageError
from harness.infrastructure import machine_failure
from harness.records import ExitCode
from harness.store import RunFolder, load_run_folder
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, TWO_BY_TWO, engine, finish, spec, until, wait_for

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
    """One engine, and its one allocation, for all rows."""
    with pytest.MonkeyPatch.context() as patch, engine() as made:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
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
    """With Slurm's word for it; the run after it has nodes again."""
    failure, act = ENDS[told]
    options = SlurmOptions(nodes=2, args=("--nodelist=n1,n2",))
    with engine(options) as made:
        run = spec(HANG)
        outcome = finish(made, run, tmp_path / "a", "hanging", lambda: act(slurm, jobs(slurm)[0]))
        assert outcome.what == "interrupted", outcome.message
        assert told in outcome.message
        assert machine_failure(load_run_folder(tmp_path / "a", run)) == failure
        slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
        assert finish(made, spec(), tmp_path / "b").what == ""
    assert jobs(slurm) == []


def test_gpus_are_asked_for_and_handed_out(slurm: LocalSlurm, tmp_path: Path) -> None:
    """A run on GPUs takes those of its nodes; each rank sees them all and knows its own."""
    run = spec(device="cuda")
    with engine(SlurmOptions(gpus_per_node=2)) as made:
        assert finish(made, run, tmp_path).what == ""
    ranks = load_run_folder(tmp_path, run).ranks
    seen = [records.start.environment["env"] for records in ranks if records.start]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == ["0,1"] * 4
    assert [env["LOCAL_RANK"] for env in seen] == ["0", "1", "0", "1"]


def test_one_allocation_for_all_runs(slurm: LocalSlurm, tmp_path: Path) -> None:
    """It has the nodes of the largest; the smaller one is on the first of them; one at a time."""
    small, large = spec(HANG, 1), spec(HANG)
    with engine() as made:
        made.check(small)
        made.check(large)
        nodes = []
        for name, run in (("a", small), ("b", large)):
            made.start(run, tmp_path / name)
            wait_for(tmp_path / name / "hanging0")
            assert not made.can_start(large)
            (job,) = jobs(slurm)
            nodes.append((job, slurm.call("squeue", "-h", "-s", "-o", "%N", f"-j{job}").split()))
            made.cancel()
        (first, (one,)), (second, (both,)) = nodes
        assert first == second
        assert (one[:2], both) in {("n1", "n[1-2]"), ("n3", "n[3-4]")}
    assert jobs(slurm) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (SlurmOptions(partition="nowhere"), "salloc refused: .*invalid partition specified"),
        (SlurmOptions(cpus_per_rank=99), "Slurm will not start job .* PartitionConfig"),
        (SlurmOptions(args=("--no-such-option",)), "no-such-option"),
    ],
)
def test_what_slurm_refuses_is_a_mistake_of_usage(
    slurm: LocalSlurm, tmp_path: Path, options: SlurmOptions, told: str
) -> None:
    """What Slurm would never start is said in one line, and no run folder is begun."""
    with engine(options) as made, pytest.raises(UsageError, match=told) as refused:
        made.start(spec(), tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_nodes_that_do_not_come_are_given_up(slurm: LocalSlurm, tmp_path: Path) -> None:
    """After `pending_s`, with the reason, and the request is taken back."""
    slurm.call("scontrol", "update", "PartitionName=all", "State=DOWN")
    try:
        told = pytest.raises(Infrastructure, match=r"did not start job \d+ in 2 s .*Partition")
        with engine(SlurmOptions(nodes=2, pending_s=2.0)) as made, told:
            made.start(spec(), tmp_path / "run")
        until(lambda: not jobs(slurm), "still queued")
    finally:
        slurm.call("scontrol", "update", "PartitionName=all", "State=UP")


SCENARIO = """\
name: on_slurm
why: Graphing must not change one bit where ranks are on two nodes.
base: {model: dense_tiny, steps: 2, graph_warmup_steps: 1}
axes: {parallel: [{dp: 4}], graph: [eager, [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 300, engine: slurm, slurm: {nodes: 2}}
"""


def harness(folder: Path, *arguments: str, around: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [*around, sys.executable, "-P", "-m", "harness", "run", *arguments, "--no-history"],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_scenario_ended_and_resumed(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Killed, then resumed and stopped, then resumed in an allocation of ours; none is left over.

    The killed one's allocation ends with it, though its run was under way.
    """
    (tmp_path / "s.yaml").write_text(SCENARIO)
    steps = lambda: slurm.call("squeue", "-h", "-s", "-o", "%i").split()  # noqa: E731
    with harness(tmp_path, "s.yaml", "--out", "run") as first:
        until(steps, "no step")
        first.kill()
    until(lambda: not jobs(slurm), "the allocation of a killed harness")
    with harness(tmp_path, "--resume", "run") as second:
        until(steps, "no step")
        second.send_signal(signal.SIGINT)
        said = second.communicate(timeout=LIMIT_S)
    assert second.returncode == ExitCode.INTERRUPTED, said
    assert jobs(slurm) == []
    around = ("salloc", "-N2", "--ntasks-per-node=1", "--cpus-per-task=2")
    with harness(tmp_path, "--resume", "run", around=around) as third:
        said = third.communicate(timeout=LIMIT_S)
    assert third.returncode == ExitCode.PASSED, said
    folder = RunFolder.open(tmp_path / "run")
    (case,) = folder.cases
    result = folder.load_run(case.candidate)
    found = [rec.start.environment["fingerprint"] for rec in result.ranks if rec.start]
    assert [fingerprint["ranks_on_node"] for fingerprint in found] == ["2"] * 4
    refused = harness(tmp_path, "s.yaml", "--slurm", "same_nodes=true")
    assert refused.communicate()[1].count("\n") == 1
    assert refused.returncode == ExitCode.USAGE


def test_an_allocation_that_is_left_over_is_cancelled(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Harness and salloc killed at once: whoever goes on with the folder cancels it first."""
    dead = engine()
    dead.start(spec(HANG), tmp_path / "a")
    assert dead._salloc is not None
    dead._salloc.kill()
    (left,) = jobs(slurm)
    with engine() as made:
        assert finish(made, spec(), tmp_path / "b").what == ""
        assert left not in jobs(slurm)
    assert dead.wait(LIMIT_S)[0].what == "interrupted"
    dead.close()


def test_too_few_nodes_of_ones_own(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that the allocation around the harness cannot hold is refused in one line."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    with engine(TWO_BY_TWO) as made, pytest.raises(UsageError, match="2 nodes, Slurm job 7 has 1"):
        made.check(spec())
