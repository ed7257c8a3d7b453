"""From reports of nodes and the word of Slurm to one outcome."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine.leader import NodeReport, Word, last_of_log, needs_word, put_together
from harness.records import ErrorRecord, RankExit, RunOutcome, RunSpec, dumps
from tests.planted.stub_ranks import start_record, step_record
from tests.unit.harness.engine.nccl_dump import GATHER, dump

SPEC = RunSpec(
    config={"graph": [], "steps": 4, "microbatches": 1}, device="cpu", world_size=4, timeout_s=60.0
)


def report(node: int, codes: tuple[int, int] = (0, 0), **more: object) -> NodeReport:
    ours = more.pop("stopped_by", "")
    ranks = (2 * node, 2 * node + 1)
    exits = tuple(
        RankExit(rank=r, code=c, killed_by_harness=bool(ours) and c == -9)
        for r, c in zip(ranks, codes, strict=True)
    )
    failed = {str(r): 100.0 + r for r, c in zip(ranks, codes, strict=True) if c and not ours}
    plain = {
        "job": "job", "node": node, "exits": [e.to_json() for e in exits],
        "failed_unix_s": failed, "stopped_by": ours, "started_unix_s": 50.0 + node,
        "wall_s": 2.0 + node,
    }  # fmt: skip
    return NodeReport.from_json(plain | more)


def stopped(*nodes: int) -> list[NodeReport]:
    return [report(node, (-9, -9), stopped_by="SIGTERM") for node in nodes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder in which every rank has begun."""
    for rank in range(4):
        lines = [dumps(start_record(SPEC, rank)), dumps(step_record(0, rank))]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def fails(folder: Path, rank: int, message: str) -> None:
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        record = ErrorRecord(
            rank=rank, step=1, what="crashed", type="E", message=message, traceback=""
        )
        file.write(dumps(record) + "\n")


def outcome(folder: Path, *reports: NodeReport, word: Word | None = None) -> RunOutcome:
    found = {r.node: r for r in reports}
    said = replace(word or Word(), job="Slurm job 7")
    return put_together(SPEC, folder, found, said, num_nodes=2, attempt=3)


def failed(code: int) -> Word:
    return Word("FAILED", "scontrol: FAILED", code)


ROWS: dict[str, tuple[list[NodeReport], Word, str, int | None, str]] = {
    "all nodes well": ([report(0), report(1)], Word(), "", None, ""),
    "lost output": (
        [report(0), report(1, problem="No space left")], Word(), "", None,
        "output lost: No space left",
    ),
    "cancelled after all was said": ([report(0), report(1)], Word("CANCELLED"), "", None, ""),
    "failed after all was said": (
        [report(0, (13, 0)), report(1)], Word("NODE_FAIL"), "crashed", 0, "rank 0 exited",
    ),
    "time is up": (stopped(0, 1), Word("TIMEOUT", "x"), "hang", None,
                   "Slurm job 7 ended as TIMEOUT (x); time was up"),
    "time is up, nobody says more": ([], Word("DEADLINE"), "hang", None, "ended as DEADLINE"),
    "memory is up, one was killed": (
        [report(0, (0, -9)), report(1)], Word("OUT_OF_MEMORY"), "oom", 1, "ended as OUT_OF_MEMORY",
    ),
    "memory is up, two were": (
        [report(0, (0, -9)), report(1, (-9, 0))], Word("OUT_OF_MEMORY"), "oom", None, "",
    ),
    "memory is up, a node is silent": ([report(0)], Word("OUT_OF_MEMORY"), "oom", None, ""),
    "an agent was killed": (
        stopped(0), failed(137), "crashed", None,
        "node 1 left no report; Slurm job 7 ended as FAILED (scontrol: FAILED",
    ),
    "no agent ever was": ([], failed(1), "interrupted", None, "nodes 0, 1 left no report"),
    "a rank died beside a silent node": (
        [report(0, (-11, 0))], failed(1), "crashed", 0, "rank 0 died by SIGSEGV",
    ),
    "nobody knows the job": (
        [], Word(), "interrupted", None,
        "nodes 0, 1 left no report; Slurm job 7 has vanished: neither squeue, scontrol nor sacct",
    ),
    "stopped, with nobody to blame": (stopped(0, 1), Word("FAILED"), "interrupted", None, ""),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_reports_and_slurm_say_together(folder: Path, row: str) -> None:
    """What ranks did themselves comes first; what Slurm did has its own answers."""
    reports, word, what, culprit, told = ROWS[row]
    got = outcome(folder, *reports, word=word)
    assert (got.what, got.culprit_rank) == (what, culprit), got.message
    assert got.message.startswith(told) or told in got.message
    assert [state.rank for state in got.ranks] == [0, 1, 2, 3]
    assert got.attempt == 3
    if len(reports) == 2:
        assert (got.started_unix_s, got.wall_s) == (50.0, 3.0)


@pytest.mark.parametrize("state", ["NODE_FAIL", "CANCELLED", "PREEMPTED", "BOOT_FAIL"])
@pytest.mark.parametrize("reported", [0, 1, 2])
def test_what_comes_from_outside_says_nothing_of_the_program(
    folder: Path, state: str, reported: int
) -> None:
    """Whatever ranks said of lost peers, and whoever reported: interrupted, with Slurm's word."""
    fails(folder, 1, "Connection closed by peer")
    got = outcome(folder, *stopped(*range(reported)), word=Word(state, "scontrol: Reason=X"))
    assert (got.what, got.culprit_rank) == ("interrupted", None)
    assert got.message.startswith(f"Slurm job 7 ended as {state} (scontrol: Reason=X")
    assert got.ending is not None
    assert got.ending.machine == ("" if state == "CANCELLED" else "node_failure")


def test_the_first_failure_of_any_node_is_to_blame(folder: Path) -> None:
    """The order of failures goes across nodes; who only lost its peer is not to blame."""
    fails(folder, 0, "Connection closed by peer")
    fails(folder, 3, "broken")
    got = outcome(folder, report(0, (1, 0)), report(1, (0, 1)))
    assert (got.what, got.culprit_rank) == ("crashed", 3)
    late = report(1, (13, 13), failed_unix_s={"2": 80.0, "3": 90.0})
    (folder / "rank3.jsonl").unlink()
    assert outcome(folder, report(0), late).culprit_rank == 2


def test_an_agent_that_was_killed_before_any_rank_began(folder: Path) -> None:
    """The program had no part in it."""
    for rank in range(4):
        (folder / f"rank{rank}.jsonl").unlink()
    assert outcome(folder, word=failed(137)).what == "interrupted"


def test_a_rank_that_raised_before_another_node_was_up(folder: Path) -> None:
    """Its words are told: an agent that is told to stop as it starts has nothing to report."""
    fails(folder, 0, "no such layer")
    got = outcome(folder, report(0, (1, 0)), word=failed(143))
    assert (got.what, got.culprit_rank) == ("crashed", 0)
    assert "no such layer" in got.message
    assert got.message.endswith("node 1 left no report")
    (folder / "rank0.jsonl").write_text((folder / "rank1.jsonl").read_text().replace("1", "0"))
    fails(folder, 0, "Connection closed by peer")
    gone = outcome(folder, report(0, (1, 0)), word=failed(1))
    assert (gone.what, gone.culprit_rank) == ("interrupted", None), "it only saw the others go"


@pytest.mark.parametrize(
    ("log", "what"),
    [
        ("0: slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT T ***\n"
         "srun: error: n1: task 0: Killed\n", "interrupted"),
        ("srun: error: n2: task 1: Killed\n"
         "0: slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT T ***\n", "crashed"),
        ("srun: error: n2: task 1: Killed\n"
         "started again by Slurm; what was there is in restart0, job.log goes on\n"
         "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT T ***\n", "interrupted"),
        ("", "crashed"),
    ],
    ids=["by somebody", "by srun", "by somebody, the second time", "not told"],
)  # fmt: skip
def test_who_ended_a_step_whose_agents_were_killed(folder: Path, log: str, what: str) -> None:
    """A step that somebody cancels is no crash of the program: srun tells of a task first."""
    (folder / "job.log").write_text(log)
    got = outcome(folder, word=failed(137))
    assert (got.what, got.culprit_rank) == (what, None)


def test_a_hang_while_the_job_was_suspended_is_none(folder: Path) -> None:
    """Time that went by without the program is not held against it; what it did itself is."""
    hung = {"timed_out": True, "stopped_by": "timeout", "suspended": True}
    got = outcome(folder, report(0, (-9, -9), **hung), report(1, (-9, -9), **hung))
    assert (got.what, got.culprit_rank) == ("interrupted", None)
    assert got.message.startswith("the job was suspended while it ran; time was up after 60 s")
    fault = outcome(folder, report(0, (-11, 0), suspended=True), report(1))
    assert (fault.what, fault.culprit_rank) == ("crashed", 0)
    for rank in range(4):
        fails(folder, rank, "Timed out waiting 5000ms for recv operation")
    waited = outcome(folder, report(0, (1, 1), suspended=True), report(1, (1, 1)))
    assert waited.what == "interrupted"


def test_evidence_of_every_node_is_read(folder: Path) -> None:
    """NCCL's dumps name the rank that others wait for, CUDA's words the kernel of a fault."""
    done = ("0", GATHER, "completed")
    dump(folder / "nccl_rank0", done, ("0", GATHER, "started"), first=8, frames=False)
    dump(folder / "nccl_rank1", done, first=8, frames=False)
    hung = {"timed_out": True, "stopped_by": "timeout"}
    got = outcome(folder, report(0, (-9, -9), **hung), report(1, (-9, -9), **hung))
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


def test_who_left_before_all_steps_is_to_blame(folder: Path) -> None:
    """The steps that are due are known on Slurm, too: rank 3 ended well after one of four."""
    for rank in range(3):
        fails(folder, rank, "Connection closed by peer")
    end = '{"kind":"end","rank":3,"steps":1,"peak_bytes":1,"startup_s":0.0,"wall_s":0.0}\n'
    with (folder / "rank3.jsonl").open("a") as file:
        file.write(end)
    got = outcome(folder, report(0, (1, 1)), report(1, (1, 0)))
    assert (got.what, got.culprit_rank) == ("crashed", 3)


def test_whether_slurm_has_to_be_asked() -> None:
    """Asked if it may have ended or killed a rank; not for what ranks did themselves."""
    assert not needs_word({0: report(0), 1: report(1, (13, -11))})
    assert needs_word({0: report(0), 1: report(1, (0, -9))})
    assert needs_word({0: report(0), 1: stopped(1)[0]})
    assert not needs_word({0: report(0, timed_out=True)})


def test_what_is_quoted_of_a_log(tmp_path: Path) -> None:
    """Slurm's own line if there is one, else the last that is no noise."""
    assert last_of_log(tmp_path) == ""
    log = tmp_path / "job.log"
    log.write_text("0: Traceback\n0: ModuleNotFoundError: x\nsrun: Force Terminated StepId=1.0\n\n")
    assert last_of_log(tmp_path) == "0: ModuleNotFoundError: x"
    log.write_text("a\nslurmstepd: *** STEP 1.0 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***\nb\n")
    assert "DUE TO TIME LIMIT" in last_of_log(tmp_path)
