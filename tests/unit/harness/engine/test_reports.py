"""From reports of nodes and the word of Slurm to one outcome."""

from pathlib import Path

import pytest

from harness.engine.outcome import NO_WORD, NOT_THE_KERNEL, NodeReport, Word, put_together
from harness.records import RankExit, RunOutcome, dumps
from tests.planted.stub_ranks import start_record, step_record
from tests.support import records
from tests.unit.harness.engine.nccl_dump import GATHER, dump

SPEC = records.run_spec(4, config={"graph": [], "steps": 4, "microbatches": 1}, timeout_s=60.0)
LOST = "Connection closed by peer"
BY_SOMEBODY = (
    "0: slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT T ***\n"
    "srun: error: n1: task 0: Killed\n"
)
BY_SRUN = "".join(reversed(BY_SOMEBODY.splitlines(keepends=True)))


def report(node: int, codes: tuple[int, int] = (0, 0), **more: object) -> NodeReport:
    ours, failed_at = bool(more.pop("ours", False)), more.pop("failed_at", 100.0)
    ranks = (2 * node, 2 * node + 1)
    exits = tuple(
        RankExit(
            rank=r, code=c, killed_by_harness=ours and c == -9,
            failed_at=float(failed_at) + r if c and not ours else None,  # type: ignore[arg-type]
        )
        for r, c in zip(ranks, codes, strict=True)
    )  # fmt: skip
    plain = {
        "job": "job", "node": node, "exits": [e.to_json() for e in exits],
        "started_unix_s": 50.0 + node, "wall_s": 2.0 + node,
    }  # fmt: skip
    return NodeReport.from_json(plain | more)


STOPPED = [report(node, (-9, -9), ours=True, was_stopped=True) for node in (0, 1)]
TIME = "time was up after 60 s"
HUNG = [report(node, (-9, -9), ours=True, waited=TIME) for node in (0, 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder in which every rank has begun."""
    for rank in range(4):
        lines = [dumps(start_record(SPEC, rank)), dumps(step_record(0, rank))]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def fails(folder: Path, rank: int, message: str) -> None:
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        file.write(dumps(records.error(rank, message=message)) + "\n")


def outcome(folder: Path, *reports: NodeReport, word: Word = NO_WORD) -> RunOutcome:
    found = {r.node: r for r in reports}
    return put_together(SPEC, folder, found, word, num_nodes=2, attempt=3)


def ended(state: str) -> Word:
    return Word(state, f"Slurm job 7 ended as {state}")


Row = tuple[list[NodeReport], Word, str, str, int | None, str]
ROWS: dict[str, Row] = {
    "all nodes well": ([report(0), report(1)], NO_WORD, "", "", None, ""),
    "lost output": (
        [report(0), report(1, problem="No space left")], NO_WORD, "", "", None,
        "output lost: No space left",
    ),
    "cancelled after all was said": (
        [report(0), report(1)], ended("CANCELLED"), BY_SOMEBODY, "", None, "",
    ),
    "failed after all was said": (
        [report(0, (13, 0)), report(1)], ended("NODE_FAIL"), "", "crashed", 0, "rank 0 exited",
    ),
    "time of the allocation is up": (
        STOPPED, ended("TIMEOUT"), "", "interrupted", None, "Slurm job 7 ended as TIMEOUT",
    ),
    "memory is up, one was killed": (
        [report(0, (0, -9)), report(1)], ended("OUT_OF_MEMORY"), "", "oom", 1, "OUT_OF_MEMORY",
    ),
    "memory of the step is up": (
        [report(0, (0, -9)), report(1)], NO_WORD, "srun: error: n1: task 0: Out Of Memory\n",
        "oom", 1, "the step ended (OUT_OF_MEMORY)",
    ),
    "so is a task's": (
        [report(0)], NO_WORD,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks\n",
        "oom", None, "oom_kill event",
    ),
    "a node of the step is lost": (
        STOPPED[:1], NO_WORD, "srun: error: Node failure on n2\n", "interrupted", None, "n2",
    ),
    "the step is preempted": (
        STOPPED, NO_WORD, "0: slurmstepd: error: *** STEP 1.0 CANCELLED AT T DUE TO PREEMPTION ***",
        "interrupted", None, "DUE TO PREEMPTION",
    ),
    "an agent was killed": (
        STOPPED[:1], Word(killed_by=9), BY_SRUN, "crashed", None, "node 1 left no report",
    ),
    "the step was cancelled, and agents killed": (
        [], Word(killed_by=9), BY_SOMEBODY, "interrupted", None, "(CANCELLED)",
    ),
    "the same, and the ends of agents are heard of first": (
        [], Word(killed_by=9), BY_SRUN, "interrupted", None, "(CANCELLED)",
    ),
    "the program killed every agent": (
        [], Word(killed_by=9), "srun: error: n1: task 0: Killed\n", "crashed", None, "no report",
    ),
    "no agent ever was": (
        [], NO_WORD, "0: Traceback\n0: ModuleNotFoundError: x\nsrun: Force Terminated StepId=1.0\n",
        "interrupted", None, "nodes 0, 1 left no report; the step ended (Slurm says no more); "
        "job.log: 0: ModuleNotFoundError: x",
    ),
    "a rank died beside a silent node": (
        [report(0, (-11, 0))], Word(killed_by=15), "", "crashed", 0, "rank 0 died by SIGSEGV",
    ),
    "stopped, with nobody to blame": (STOPPED, NO_WORD, "", "interrupted", None, ""),
    "time is up": (HUNG, NO_WORD, "", "hang", None, TIME),
    "killed by the kernel": (
        [report(0, (0, -9), memory_kills=2), report(1)], NO_WORD, "", "killed", 1,
        "the kernel killed 2 for want of memory meanwhile",
    ),
    "killed by somebody": (
        [report(0, memory_kills=2), report(1, (0, -9), memory_kills=0)], NO_WORD, "", "killed", 3,
        NOT_THE_KERNEL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_reports_and_slurm_say_together(folder: Path, row: str) -> None:
    """What ranks did themselves comes first; what Slurm did has its own answers."""
    reports, word, log, what, culprit, told = ROWS[row]
    (folder / "job.log").write_text(log)
    got = outcome(folder, *reports, word=word)
    assert (got.what, got.culprit_rank) == (what, culprit), got.message
    assert told in got.message
    assert [state.rank for state in got.ranks] == [0, 1, 2, 3]
    assert got.attempt == 3
    assert got.from_outside == (row == "killed by somebody")
    if len(reports) == 2:
        assert (got.started_unix_s, got.wall_s) == (50.0, 3.0)


@pytest.mark.parametrize("state", ["NODE_FAIL", "CANCELLED", "PREEMPTED", "BOOT_FAIL"])
@pytest.mark.parametrize("reported", [0, 1, 2])
def test_what_comes_from_outside_says_nothing_of_the_program(
    folder: Path, state: str, reported: int
) -> None:
    """Whatever ranks said of lost peers, and whoever reported: interrupted, with Slurm's word."""
    fails(folder, 1, LOST)
    got = outcome(folder, *STOPPED[:reported], word=ended(state))
    assert (got.what, got.culprit_rank) == ("interrupted", None)
    assert got.message.startswith(f"Slurm job 7 ended as {state}")
    assert got.ending is not None
    assert got.ending.machine == ("" if state == "CANCELLED" else "node_failure")


ENDED_AFTER_1 = '{"kind":"end","rank":3,"steps":1,"peak_bytes":1,"startup_s":0.0,"wall_s":0.0}\n'
LATE = report(1, (13, 13), failed_at=80.0)
SAID: dict[str, tuple[dict[int, str], list[NodeReport], int, str, int | None]] = {
    "the first failure that is no lost peer": (
        {0: LOST, 3: "broken"}, [report(0, (1, 0)), report(1, (0, 1))], 0, "crashed", 3),
    "the first of any node": ({0: LOST}, [report(0), LATE], 0, "crashed", 2),
    "what a rank says, beside a silent node": (
        {0: "no such layer"}, [report(0, (1, 0))], 15, "crashed", 0),
    "only lost peers, beside a silent node": (
        {0: LOST}, [report(0, (1, 0))], 0, "interrupted", None),
    "one ended well after one of four steps": (
        {**dict.fromkeys(range(3), LOST), 3: ""}, [report(0, (1, 1)), report(1, (1, 0))], 0,
        "crashed", 3),
}  # fmt: skip


@pytest.mark.parametrize("row", SAID)
def test_what_ranks_say_across_nodes(folder: Path, row: str) -> None:
    """The order of failures goes across nodes; who only lost its peer is not to blame."""
    errors, reports, killed_by, what, culprit = SAID[row]
    for rank, message in errors.items():
        if message:
            fails(folder, rank, message)
        else:
            with (folder / f"rank{rank}.jsonl").open("a") as file:
                file.write(ENDED_AFTER_1)
    got = outcome(folder, *reports, word=Word(killed_by=killed_by))
    assert (got.what, got.culprit_rank) == (what, culprit), got.message
    if len(reports) == 1 and what == "crashed":
        assert "no such layer" in got.message
        assert got.message.endswith("node 1 left no report")


def test_evidence_of_every_node_is_read(folder: Path) -> None:
    """NCCL's dumps name the rank that others wait for, CUDA's words the kernel of a fault."""
    done = ("0", GATHER, "completed")
    dump(folder / "nccl_rank0", done, ("0", GATHER, "started"), first=8, frames=False)
    dump(folder / "nccl_rank1", done, first=8, frames=False)
    got = outcome(folder, *HUNG)
    assert (got.what, got.culprit_rank) == ("hang", 1)
    assert "rank 1 never entered all_gather_base (collective 9 of ranks 0,1)" in got.message
    (folder / "rank2.stderr").write_text(
        "CUDA error: an illegal memory access was encountered\n"
        "[07:05] coredump: Detected an exception of type CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS\n"
        "[07:05] coredump:   #0\t0x7f3c43786350\tscatter_add(float*)\n"
    )
    got = outcome(folder, report(0), report(1, (-6, 0)))
    assert (got.what, got.culprit_rank) == ("illegal_access", 2)
    assert "CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS in kernel scatter_add" in got.message
