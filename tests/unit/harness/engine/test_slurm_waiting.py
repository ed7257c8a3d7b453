"""The Slurm engine's waiting, over files that a test writes and states that it makes up."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine.node_reports import NodeReport, report_path
from harness.engine.slurm import Patience, SlurmEngine
from harness.engine.slurm_calls import Account, JobState, NoAnswer, QueueFull
from harness.engine.slurm_job import SlurmOptions, Submission, load_submission, save_submission
from harness.errors import Infrastructure
from harness.records import RankExit, RunSpec, dumps

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

    def submit(self, options: list[str], script: str, name: str, tried: bool = False) -> int:
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
        self.cancelled += job_ids


def make(
    monkeypatch: pytest.MonkeyPatch,
    late_s: float = 60.0,
    leave_s: float = 60.0,
    options: SlurmOptions | None = None,
) -> tuple[SlurmEngine, Calls]:
    patience = Patience(
        poll_s=0.001, late_s=late_s, away_s=0.0, cancel_s=0.01, full_s=0.0, leave_s=leave_s
    )
    engine, calls = SlurmEngine(options or SlurmOptions(), patience=patience), Calls()
    monkeypatch.setattr(engine, "_calls", calls)
    return engine, calls


def submission(folder: Path) -> Submission:
    found = load_submission(folder)
    assert found is not None
    return found


def report(
    folder: Path, code: int = 0, records: int = 0, job: str = "", restart: int = 0, node: int = 0
) -> None:
    made = NodeReport(
        job=job or submission(folder).name, restart=restart, node=node, failed_unix_s={},
        exits=tuple(RankExit(rank=rank, code=code) for rank in range(2)), timed_out=False,
        stopped_by="", record_bytes={"0": records, "1": records}, problem="", started_unix_s=1.0,
    )  # fmt: skip
    (folder / report_path(node)).write_text(dumps(made))


def test_records_that_show_late_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A report is there before the records that it speaks of: concluded when all bytes are."""
    engine, calls = make(monkeypatch)
    engine.start(RUN, tmp_path)
    report(tmp_path, records=len(RECORDS))
    assert engine.wait(0.01) == []
    (tmp_path / "rank0.jsonl").write_bytes(RECORDS)
    (tmp_path / "rank1.jsonl").write_bytes(RECORDS[:-1])
    assert engine.wait(0.01) == []
    (tmp_path / "rank1.jsonl").write_bytes(RECORDS)
    (outcome,) = engine.wait(5.0)
    assert outcome.what != "interrupted"
    assert calls.asked == []


def test_records_that_never_show_are_the_machines_doing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a bound it is said which rank's records are short, and by how much."""
    engine, _ = make(monkeypatch, late_s=0.02)
    engine.start(RUN, tmp_path)
    report(tmp_path, records=len(RECORDS))
    (outcome,) = engine.wait(5.0)
    assert outcome.what == "interrupted"
    assert "the records of rank 0 on node 0 have 100 bytes there, 0 here" in outcome.message


def test_reports_of_another_job_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a job left that is not ours, or cannot be read, is as good as nothing."""
    engine, _ = make(monkeypatch)
    engine.start(RUN, tmp_path)
    report(tmp_path, job="another")
    assert engine.wait(0.01) == []
    (tmp_path / report_path(0)).write_text("{")
    assert engine.wait(0.01) == []


def test_nodes_of_two_starts_are_no_whole_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a node said before Slurm started the job again does not count for the second start."""
    engine, _ = make(monkeypatch)
    monkeypatch.setattr(engine, "_options", SlurmOptions(nodes=2))
    engine.start(RUN, tmp_path)
    assert submission(tmp_path).num_nodes == 2
    report(tmp_path, restart=1)
    report(tmp_path, node=1)
    assert engine.wait(0.01) == []
    report(tmp_path, node=1, restart=1)
    assert [outcome.key for outcome in engine.wait(5.0)] == [RUN.key]


def test_a_job_that_is_over_has_time_to_show_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """COMPLETED and no report yet: waited for; a report that comes then is what counts."""
    engine, calls = make(monkeypatch)
    engine.start(RUN, tmp_path)
    calls.state = JobState(7, "COMPLETED", "None")
    assert engine.wait(0.01) == []
    report(tmp_path)
    (outcome,) = engine.wait(5.0)
    assert "COMPLETED" not in outcome.message


def test_completed_without_a_report_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slurm's word alone never makes a run well."""
    engine, calls = make(monkeypatch, late_s=0.02)
    engine.start(RUN, tmp_path)
    calls.state = JobState(7, "COMPLETED", "None")
    (outcome,) = engine.wait(5.0)
    assert outcome.what == "interrupted"
    assert "node 0 left no report; Slurm job 7 ended as COMPLETED (said)" in outcome.message


def test_a_job_that_squeue_does_not_know_yet_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unknown for a moment, then running: nothing is concluded, and the clock starts anew."""
    engine, calls = make(monkeypatch, late_s=0.2)
    engine.start(RUN, tmp_path)
    running, calls.state = calls.state, None
    assert engine.wait(0.05) == []
    calls.state = running
    assert engine.wait(0.3) == []
    calls.state = None
    assert engine.wait(0.05) == []
    (outcome,) = engine.wait(5.0)
    assert "has vanished" in outcome.message


def test_a_job_that_waits_for_ever_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Held after failed launches: cancelled, not run, with Slurm's reason; a queue is waited in."""
    engine, calls = make(monkeypatch)
    engine.start(RUN, tmp_path)
    calls.state = JobState(7, "PENDING", "Resources")
    assert engine.wait(0.01) == []
    calls.state = JobState(7, "PENDING", "launch failed requeued held")
    (outcome,) = engine.wait(5.0)
    assert (outcome.what, calls.cancelled) == ("not_run", [7])
    assert "launch failed requeued held" in outcome.message


def test_a_job_that_is_not_started_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`pending_s` is up: cancelled, not run, with the reason that Slurm gave last."""
    engine, calls = make(monkeypatch, options=SlurmOptions(pending_s=0.005))
    engine.start(RUN, tmp_path)
    calls.state = JobState(7, "PENDING", "PartitionDown")
    (outcome,) = engine.wait(60.0)
    assert (outcome.what, calls.cancelled) == ("not_run", [7])
    assert outcome.message.endswith("in 0.005 s (launch.slurm.pending_s): PartitionDown")


def test_a_job_that_outstays_its_run_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All nodes have reported and the job does not end: it must not hold its nodes for hours."""
    engine, calls = make(monkeypatch, leave_s=0.0)
    engine.start(RUN, tmp_path)
    report(tmp_path)
    (outcome,) = engine.wait(5.0)
    assert outcome.what == ""
    assert calls.cancelled == []
    engine.close()
    assert calls.cancelled == [7]


def test_a_killed_rank_may_have_been_killed_for_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGKILL from outside waits for the end of the job, which knows whether memory ran out."""
    engine, calls = make(monkeypatch)
    engine.start(RUN, tmp_path)
    report(tmp_path, code=-9)
    assert engine.wait(0.01) == []
    calls.state = JobState(7, "OUT_OF_MEMORY", "None")
    (outcome,) = engine.wait(5.0)
    assert outcome.what == "oom"


def test_a_controller_that_is_away_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failing squeue concludes no run; what is finished is taken from its files meanwhile."""
    engine, calls = make(monkeypatch)
    engine.start(RUN, tmp_path)

    def away() -> None:
        report(tmp_path)
        raise NoAnswer("squeue: away")

    calls.on_states = away
    monkeypatch.setattr(engine, "_answered_s", float("inf"))
    assert [outcome.key for outcome in engine.wait(5.0)] == [RUN.key]


def test_a_cancelled_submission_of_unknown_fate_says_so_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped in the middle of sbatch: a job that starts after all finds that it is not wanted."""
    engine, calls = make(monkeypatch)

    def stopped(options: list[str], script: str, name: str, tried: bool = False) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "submit", stopped)
    with pytest.raises(KeyboardInterrupt):
        engine.start(RUN, tmp_path)
    assert not submission(tmp_path).cancelled
    engine.cancel()
    assert submission(tmp_path).cancelled
    calls.name = submission(tmp_path).name
    assert not engine.adopt(RUN, tmp_path), "although Slurm knows it: it leaves when it starts"


def test_jobs_that_cannot_be_cancelled_can_be_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """scancel without an answer leaves the job's folder as it is: `adopt` goes on with it."""
    engine, calls = make(monkeypatch)
    engine.start(RUN, tmp_path)

    def away(*, job_ids: list[int], names: list[str]) -> None:
        raise NoAnswer("away")

    monkeypatch.setattr(calls, "cancel", away)
    engine.cancel()
    assert engine.wait(0.0) == []
    assert engine.adopt(RUN, tmp_path)


def test_what_the_queue_has_no_room_for_is_put_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With others on their way a full queue is waited for; alone in it, it is a refusal."""
    engine, calls = make(monkeypatch)
    room, plain = list[int](), calls.submit

    def submit(options: list[str], script: str, name: str, tried: bool = False) -> int:
        if not room:
            raise QueueFull("sbatch refused: AssocMaxSubmitJobLimit")
        return room.pop() + plain(options, script, name)

    monkeypatch.setattr(calls, "submit", submit)
    second = dataclasses.replace(RUN, replica=1)
    with pytest.raises(QueueFull):
        engine.start(RUN, tmp_path / "alone")
    room.append(0)
    engine.start(RUN, tmp_path / "first")
    first = submission(tmp_path / "first")
    engine.start(second, tmp_path / "second")
    assert submission(tmp_path / "second").job_id is None
    assert not engine.can_start(dataclasses.replace(RUN, replica=2)), "each try may take a minute"
    calls.name = first.name
    assert engine.wait(0.05) == []
    report(tmp_path / "first")
    assert [outcome.key for outcome in engine.wait(5.0)] == [RUN.key]
    assert engine.wait(0.05) == []
    room.append(1)
    assert engine.wait(0.05) == []
    report(tmp_path / "second")
    assert submission(tmp_path / "second").job_id == 8
    assert [outcome.key for outcome in engine.wait(5.0)] == [second.key]
    assert engine.can_start(dataclasses.replace(RUN, replica=2))


def test_a_job_whose_id_never_came_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed between sbatch and the note of its answer: the job is adopted, its id learnt."""
    dead, calls = make(monkeypatch)
    dead.start(RUN, tmp_path)
    known = submission(tmp_path)
    save_submission(tmp_path, dataclasses.replace(known, job_id=None))
    assert make_other(dead, monkeypatch, calls).adopt(RUN, tmp_path)
    assert submission(tmp_path) == known


@pytest.mark.parametrize(
    ("state", "adopted"),
    [("RUNNING", True), ("PENDING", True), ("COMPLETED", True), ("TIMEOUT", True),
     ("CANCELLED", False), ("NODE_FAIL", False), ("", False)],
)  # fmt: skip
def test_which_jobs_are_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, adopted: bool
) -> None:
    """Alive, or ended by itself: taken over. Ended from outside, or unknown: made again."""
    dead, calls = make(monkeypatch)
    dead.start(RUN, tmp_path)
    calls.state = JobState(7, state, "None") if state else None
    engine, _ = make(monkeypatch)
    monkeypatch.setattr(engine, "_calls", calls)
    assert engine.adopt(RUN, tmp_path) == adopted
    if not adopted:
        report(tmp_path)
        assert engine.adopt(RUN, tmp_path), "its files say all"


def test_a_failure_that_squeue_has_forgotten_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What sacct still calls a TIMEOUT, or reports call a crash, stands: no second chance."""
    dead, calls = make(monkeypatch)
    dead.start(RUN, tmp_path)
    calls.state = None
    engine, _ = make(monkeypatch, late_s=0.0)
    monkeypatch.setattr(engine, "_calls", calls)
    assert not engine.adopt(RUN, tmp_path), "nobody knows"
    known = Account("TIMEOUT", "sacct: TIMEOUT")
    monkeypatch.setattr(calls, "account", lambda job_id, name: known)
    assert engine.adopt(RUN, tmp_path)
    (outcome,) = engine.wait(60.0)
    assert (outcome.what, "ended as TIMEOUT" in outcome.message) == ("hang", True)


def test_nothing_is_adopted_while_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Away is not gone: without an answer there must be no second job."""
    engine, calls = make(monkeypatch)
    engine.start(RUN, tmp_path)

    def away() -> None:
        raise Infrastructure("away")

    calls.on_states = away
    with pytest.raises(Infrastructure, match="away"):
        make_other(engine, monkeypatch, calls).adopt(RUN, tmp_path)


def make_other(engine: SlurmEngine, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> SlurmEngine:
    """Another engine that talks to the same Slurm."""
    other, _ = make(monkeypatch)
    monkeypatch.setattr(other, "_calls", calls)
    return other
