"""The Slurm engine's waiting, over files that a test writes and states that it makes up."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.node_reports import NodeReport, report_path
from harness.engine.slurm import Patience, SlurmEngine
from harness.engine.slurm_calls import Account, JobState, NoAnswer, QueueFull
from harness.engine.slurm_job import (
    SlurmOptions,
    Submission,
    load_submission,
    save_submission,
    share_out,
)
from harness.errors import Infrastructure
from harness.records import RankExit, RunOutcome, RunSpec, dumps

RUN = RunSpec(
    config={"graph": [], "steps": 4, "microbatches": 1}, device="cpu", world_size=2, timeout_s=60.0
)
RECORDS = b"x" * 100


class Calls:
    """In the place of Slurm's commands."""

    def __init__(self) -> None:
        self.state: JobState | None = JobState(7, "RUNNING", "None")
        self.asked: list[str] = []
        self.cancelled: list[int] = []
        self.name = ""
        self.on_states: Callable[[], None] = lambda: None
        self.on_submit: Callable[[], None] = lambda: None
        self.on_cancel: Callable[[], None] = lambda: None

    def submit(self, options: list[str], script: str, name: str, tried: bool = False) -> int:
        self.on_submit()
        self.name = name
        return 7

    def states(self) -> dict[str, JobState]:
        self.on_states()
        return {self.name: self.state} if self.state else {}

    def patiently(self, ask: Callable[[], dict[str, JobState]]) -> dict[str, JobState]:
        return ask()

    def account(self, job_id: int, name: str) -> Account:
        self.asked.append(name)
        return Account(self.state.state, "said") if self.state else Account()

    def cancel(self, *, job_ids: list[int], names: list[str]) -> None:
        self.on_cancel()
        self.cancelled += job_ids


@dataclasses.dataclass
class Bench:
    """One run of an engine over such calls."""

    engine: SlurmEngine
    calls: Calls
    folder: Path

    def start(self) -> "Bench":
        self.engine.start(RUN, self.folder)
        return self

    def state(self, name: str, reason: str = "None") -> None:
        """What squeue says from now on; "" if it does not know the job."""
        self.calls.state = JobState(7, name, reason) if name else None

    def end(self) -> RunOutcome:
        (outcome,) = self.engine.wait(60.0)
        return outcome

    def goes_on(self, for_s: float = 0.01) -> bool:
        return self.engine.wait(for_s) == []

    def submission(self) -> Submission:
        found = load_submission(self.folder)
        assert found is not None
        return found

    def report(
        self, code: int = 0, records: int = 0, job: str = "", restart: int = 0, node: int = 0
    ) -> None:
        made = NodeReport(
            job=job or self.submission().name, restart=restart, node=node, started_unix_s=1.0,
            exits=tuple(RankExit(rank=rank, code=code) for rank in range(2)),
            record_bytes={"0": records, "1": records},
        )  # fmt: skip
        (self.folder / report_path(node)).write_text(dumps(made))


MakeBench = Callable[..., Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeBench:
    """`make(calls, options=..., late_s=..., leave_s=...)`; calls are those of another, if given."""

    def bench(
        calls: Calls | None = None,
        options: SlurmOptions | None = None,
        late_s: float = 60.0,
        leave_s: float = 60.0,
    ) -> Bench:
        patience = Patience(
            poll_s=0.001, late_s=late_s, away_s=0.0, cancel_s=0.01, full_s=0.0, leave_s=leave_s
        )
        made = Bench(SlurmEngine(options or SlurmOptions(), patience=patience), calls or Calls(),
                     tmp_path)  # fmt: skip
        monkeypatch.setattr(made.engine, "_calls", made.calls)
        return made

    return bench


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_records_that_show_late_are_waited_for(make: MakeBench) -> None:
    """A report is there before the records that it speaks of: concluded when all bytes are."""
    run = make().start()
    run.report(records=len(RECORDS))
    assert run.goes_on()
    (run.folder / "rank0.jsonl").write_bytes(RECORDS)
    (run.folder / "rank1.jsonl").write_bytes(RECORDS[:-1])
    assert run.goes_on()
    (run.folder / "rank1.jsonl").write_bytes(RECORDS)
    assert run.end().what != "interrupted"
    assert run.calls.asked == []


def test_records_that_never_show_are_the_machines_doing(make: MakeBench) -> None:
    """After a bound it is said which rank's records are short, and by how much."""
    run = make(late_s=0.02).start()
    run.report(records=len(RECORDS))
    outcome = run.end()
    assert outcome.what == "interrupted"
    assert "the records of rank 0 on node 0 have 100 bytes there, 0 here" in outcome.message


def test_reports_that_do_not_count(make: MakeBench) -> None:
    """Those of another job, of an earlier start, and what cannot be read, are as good as none."""
    run = make(options=SlurmOptions(nodes=2)).start()
    assert run.submission().num_nodes == 2
    run.report(restart=1)
    for spoil in (lambda: run.report(node=1), lambda: run.report(node=1, restart=1, job="another"),
                  lambda: (run.folder / report_path(1)).write_text("{")):  # fmt: skip
        spoil()
        assert run.goes_on()
    run.report(node=1, restart=1)
    assert run.end().key == RUN.key


def test_a_job_that_is_over_has_time_to_show_its_files(make: MakeBench) -> None:
    """COMPLETED and no report yet: waited for; a report that comes then is what counts."""
    run = make().start()
    run.state("COMPLETED")
    assert run.goes_on()
    run.report()
    assert "COMPLETED" not in run.end().message


def test_completed_without_a_report_is_no_pass(make: MakeBench) -> None:
    """Slurm's word alone never makes a run well."""
    run = make(late_s=0.02).start()
    run.state("COMPLETED")
    outcome = run.end()
    assert outcome.what == "interrupted"
    assert "node 0 left no report; Slurm job 7 ended as COMPLETED (said)" in outcome.message
    assert outcome.started_unix_s == run.submission().submitted_unix_s


def test_a_job_that_squeue_does_not_know_yet_is_not_gone(make: MakeBench) -> None:
    """Unknown for a moment, then running: nothing is concluded, and the clock starts anew."""
    run = make(late_s=0.2).start()
    for state, for_s in (("", 0.05), ("RUNNING", 0.3), ("", 0.05)):
        run.state(state)
        assert run.goes_on(for_s)
    assert "has vanished" in run.end().message


@pytest.mark.parametrize(
    ("reason", "pending_s", "told"),
    [
        ("launch failed requeued held", 1e9,
         "Slurm will not start job 7 by itself: launch failed requeued held"),
        ("PartitionDown", 0.05,
         "Slurm did not start job 7 in 0.05 s (launch.slurm.pending_s): PartitionDown"),
    ],
)  # fmt: skip
def test_a_job_that_does_not_start_is_given_up(
    make: MakeBench, reason: str, pending_s: float, told: str
) -> None:
    """Cancelled, not run, with Slurm's reason; a queue is waited in, anew after a requeue."""
    run = make(options=SlurmOptions(pending_s=pending_s)).start()
    for state in ("PENDING", "RUNNING"):
        run.state(state, "Resources")
        assert run.goes_on(0.03)
    run.state("PENDING", "Resources")
    assert run.goes_on(0.03)
    run.state("PENDING", reason)
    outcome = run.end()
    assert (outcome.what, outcome.message, run.calls.cancelled) == ("not_run", told, [7])


@pytest.mark.parametrize(
    ("state", "leave_s", "cancelled"),
    [("RUNNING", 0.0, [7]), ("COMPLETING", 0.0, []), ("CANCELLED", 0.0, []), ("", 0.0, [])],
)
def test_a_job_that_outstays_its_run_is_cancelled(
    make: MakeBench, state: str, leave_s: float, cancelled: list[int]
) -> None:
    """It must not hold its nodes for hours; one that leaves, is over or unknown is left alone."""
    run = make(leave_s=leave_s).start()
    run.report()
    assert run.end().what == ""
    assert run.calls.cancelled == []
    run.state(state)
    run.engine.close()
    assert run.calls.cancelled == cancelled


def test_a_killed_rank_may_have_been_killed_for_its_memory(make: MakeBench) -> None:
    """SIGKILL from outside waits for the end of the job, which knows whether memory ran out."""
    run = make().start()
    run.report(code=-9)
    assert run.goes_on()
    run.state("OUT_OF_MEMORY")
    assert run.end().what == "oom"


def test_a_controller_that_is_away_ends_nothing(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing squeue concludes no run; what is finished is taken from its files meanwhile."""
    run = make().start()

    def away() -> None:
        run.report()
        raise NoAnswer("squeue: away")

    run.calls.on_states = away
    monkeypatch.setattr(run.engine, "_answered_s", float("inf"))
    assert run.end().key == RUN.key


def test_a_cancelled_submission_of_unknown_fate_says_so_in_its_folder(make: MakeBench) -> None:
    """Stopped in the middle of sbatch: a job that starts after all finds that it is not wanted."""
    run = make()
    run.calls.on_submit = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run.start()
    assert not run.submission().cancelled
    run.engine.cancel()
    assert run.submission().cancelled
    run.calls.name = run.submission().name
    assert not run.engine.adopt(RUN, run.folder), "although Slurm knows it: it leaves as it starts"


def test_jobs_that_cannot_be_cancelled_can_be_found_again(make: MakeBench) -> None:
    """scancel without an answer leaves the job's folder as it is: `adopt` goes on with it."""
    run = make().start()
    run.calls.on_cancel = raising(NoAnswer("away"))
    run.engine.cancel()
    assert run.goes_on(0.0)
    assert run.engine.adopt(RUN, run.folder)


def test_what_the_queue_has_no_room_for_is_put_off(make: MakeBench) -> None:
    """With others on their way a full queue is waited for; alone in it, it is a refusal."""
    run, room = make(), list[int]()
    second, third = (dataclasses.replace(RUN, replica=replica) for replica in (1, 2))
    later = dataclasses.replace(run, folder=run.folder / "second")

    def submit() -> None:
        if not room:
            raise QueueFull("sbatch refused: AssocMaxSubmitJobLimit")
        room.pop()

    run.calls.on_submit = submit
    with pytest.raises(QueueFull):
        run.engine.start(RUN, run.folder / "alone")
    room.append(1)
    run.start()
    run.engine.start(second, later.folder)
    assert later.submission().job_id is None
    assert not run.engine.can_start(third), "each try may take a minute"
    assert run.goes_on()
    run.report()
    assert run.end().key == RUN.key
    assert run.goes_on()
    room.append(1)
    assert run.goes_on()
    later.report()
    assert later.submission().job_id == 7
    assert run.end().key == second.key
    assert run.engine.can_start(third)


def test_a_job_whose_id_never_came_is_found_by_its_name(make: MakeBench) -> None:
    """Killed between sbatch and the note of its answer: the job is adopted, its id learnt."""
    dead = make().start()
    known = dead.submission()
    save_submission(dead.folder, dataclasses.replace(known, job_id=None))
    assert make(dead.calls).engine.adopt(RUN, dead.folder)
    assert dead.submission() == known


@pytest.mark.parametrize(
    ("state", "adopted"),
    [("RUNNING", True), ("PENDING", True), ("COMPLETED", True), ("TIMEOUT", True),
     ("CANCELLED", False), ("NODE_FAIL", False), ("", False)],
)  # fmt: skip
def test_which_jobs_are_gone_on_with(make: MakeBench, state: str, adopted: bool) -> None:
    """Alive, or ended by itself: taken over. Ended from outside, or unknown: run again."""
    dead = make().start()
    dead.state(state)
    assert make(dead.calls).engine.adopt(RUN, dead.folder) == adopted
    if not adopted:
        dead.report()
        assert make(dead.calls).engine.adopt(RUN, dead.folder), "its files say all"


def test_a_failure_that_squeue_has_forgotten_is_not_made_again(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sacct still calls a TIMEOUT stands: no second chance."""
    dead = make().start()
    dead.state("")
    run = make(dead.calls, late_s=0.0)
    known = Account("TIMEOUT", "sacct: TIMEOUT")
    monkeypatch.setattr(run.calls, "account", lambda job_id, name: known)
    assert run.engine.adopt(RUN, run.folder)
    outcome = run.end()
    assert (outcome.what, "ended as TIMEOUT" in outcome.message) == ("hang", True)


def test_nothing_is_adopted_while_nobody_answers(make: MakeBench) -> None:
    """Away is not gone: without an answer there must be no second job."""
    dead = make().start()
    dead.calls.on_states = raising(Infrastructure("away"))
    with pytest.raises(Infrastructure, match="away"):
        make(dead.calls).engine.adopt(RUN, dead.folder)


# --- which ranks go on which node -------------------------------------------------------------

COUNT = st.integers(1, 70)


@given(COUNT, COUNT, st.none() | COUNT)
def test_every_rank_is_on_one_node_and_no_node_is_empty(
    world_size: int, nodes: int, most: int | None
) -> None:
    """The nodes' ranks are all ranks in order; no node is empty or holds more than it may."""
    options = SlurmOptions(nodes=nodes, ranks_per_node=most)
    shares = share_out(world_size, options, "cpu")
    parts = [list(shares.ranks(node)) for node in range(shares.num_nodes)]
    assert [rank for part in parts for rank in part] == list(range(world_size))
    assert all(parts)
    assert max(map(len, parts)) == shares.ranks_per_node <= (most or world_size)
    with pytest.raises(ValueError, match="Expected a node below"):
        shares.ranks(shares.num_nodes)


@pytest.mark.parametrize(
    ("world_size", "options", "device", "expected"),
    [
        (4, SlurmOptions(), "cpu", (1, 4)),
        (1, SlurmOptions(nodes=2), "cpu", (1, 1)),
        (8, SlurmOptions(nodes=3), "cpu", (3, 3)),
        (16, SlurmOptions(gpus_per_node=8), "cuda", (2, 8)),
        (16, SlurmOptions(gpus_per_node=8), "cpu", (1, 16)),
        (16, SlurmOptions(gpus_per_node=8, ranks_per_node=4), "cuda", (4, 4)),
        (16, SlurmOptions(gpus_per_node=8, nodes=4), "cuda", (4, 4)),
        (5, SlurmOptions(nodes=4), "cpu", (3, 2)),
    ],
)
def test_how_many_nodes_a_run_takes(
    world_size: int, options: SlurmOptions, device: str, expected: tuple[int, int]
) -> None:
    """As few as `ranks_per_node` (by default the GPUs) allows, at least `nodes`."""
    shares = share_out(world_size, options, device)
    assert (shares.num_nodes, shares.ranks_per_node) == expected
