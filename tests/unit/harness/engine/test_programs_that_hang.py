"""Programs that stall or leave others behind: when a leader looks, and whom it names."""

from pathlib import Path
from typing import Any

import pytest

from harness.engine.crew import Job, Records
from harness.engine.outcome import Answer, RankEvidence, classify
from harness.engine.watch import Limits, Phase, Watch
from harness.engine.whereabouts import Place
from harness.records import EndRecord, RankExit, RankRecords, RunSpec
from harness.soaking import SoakSpec
from harness.store.streams import has_begun, has_end_record, rank_path


def job(soak: SoakSpec | None = None, **config: Any) -> Job:
    spec = RunSpec(config=config, device="cpu", world_size=2, timeout_s=100, soak=soak)
    return Job(spec=spec, folder=Path())


def watch(ranks: int = 2, stall_s: float | None = None) -> Watch:
    return Watch(ranks=range(ranks), timeout_s=100, limits=Limits(), started_s=0, stall_s=stall_s)


def test_a_rank_that_leaves_early_gives_the_others_grace() -> None:
    """Exit code 0 without an end record ends the wait; with one it does not."""
    whole, early = watch(), watch()
    whole.ended(0, 0, 10.0)
    early.ended(0, 0, 10.0, left_early=True)
    assert (whole.phase, whole.deadline_s) == (Phase.RUNNING, 100)
    assert (early.phase, early.deadline_s) == (Phase.GRACE, 10.0 + Limits().grace_s)
    assert early.failed_order == []
    assert early.advance(10.0 + Limits().grace_s) is not None
    assert not early.timed_out
    assert not early.stalled


def test_the_last_rank_to_leave_early_is_waited_for_no_longer() -> None:
    """With nobody left to wait there is no signal to send."""
    alone = watch(1)
    alone.ended(0, 0, 10.0, left_early=True)
    assert alone.advance(1000.0) is None


def test_a_stall_counts_from_the_last_progress() -> None:
    """Nothing is looked at before `stall_s` is up; progress puts it off, up to the timeout."""
    patient = watch(stall_s=30)
    assert not patient.may_stall(29.9)
    assert patient.may_stall(30.0)
    patient.progressed(30.0)
    assert patient.deadline_s == 60
    patient.progressed(90.0)
    assert patient.deadline_s == 100
    patient.progressed(50.0)
    assert patient.advance(80.0) is not None
    assert patient.stalled


START, NAMES = '{"kind":"start"}\n', '{"kind":"names","step":-1}\n'
STEPS_OF_4_S = '{"kind":"step","step_s":9.0}\n{"kind":"step","step_s":4.0}\n{"kind":"step","st'
INITIAL, STEP = '{"digests":{},"kind":"initial"}\n', '{"kind":"step","step":0}\n'


@pytest.mark.parametrize(
    ("text", "begun"),
    [(None, False), ("", False), (START, False), (START + NAMES, False), (START + INITIAL, True),
     (START + STEP, True)],
)  # fmt: skip
def test_a_rank_has_begun_with_its_state(text: str | None, begun: bool, tmp_path: Path) -> None:
    """Importing and loading are no silence of a run that trains."""
    path = tmp_path / "rank0.jsonl"
    if text is not None:
        path.write_text(text)
    assert has_begun(path, is_builtin=False) == begun
    # The built-in trainer has yet to compile and capture when it records its state.
    assert has_begun(path, is_builtin=True) == (begun and text != START + INITIAL)


@pytest.mark.parametrize(
    ("text", "ended"),
    [(START, False), (START + '{"kind":"end"}\n', True), ('{"kind":"end"}\n' + STEP, False)],
)
def test_only_a_last_line_is_an_end(text: str, ended: bool, tmp_path: Path) -> None:
    """An end record that something follows is none."""
    path = tmp_path / "rank0.jsonl"
    path.write_text(text)
    assert has_end_record(path) == ended


def test_a_stall_is_looked_for_once_a_rank_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that a program may be silent; afterwards each look needs new records."""
    monkeypatch.chdir(tmp_path)
    records = Records(job(program={"script": "train.py"}))
    looks = []
    for text in ("", START, START, START + INITIAL, START + INITIAL, START + INITIAL,
                 START + INITIAL + STEP):  # fmt: skip
        rank_path(Path(), 1).write_text(text)
        looks.append(records.have_grown(1e6))
    assert looks == [True, True, True, True, True, False, True]


def test_a_soak_may_be_silent_for_as_long_as_its_steps_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are written 100 at a time, of 4 s each, are no stall after 300 s, nor is a start.

    One that goes on longer is.
    """
    monkeypatch.chdir(tmp_path)
    soak = SoakSpec(by="steps", amount=1000, stall_s=300)
    records, clock = Records(job(soak, flush_every=100)), watch(stall_s=soak.stall_s)
    clock.timeout_s = 1e6
    file = rank_path(Path(), 0)
    file.write_text(START)
    assert records.have_grown(300)
    assert records.have_grown(6 * 300 - 1)
    assert not records.have_grown(6 * 300)
    file.write_text(START + STEPS_OF_4_S)
    assert records.have_grown(1800)
    assert records.have_grown(1801)
    clock.window_s = records.window_s
    clock.progressed(1801)
    assert clock.patience_s == 2 * 400
    assert not clock.may_stall(1801 + 799)
    assert clock.may_stall(1801 + 800)
    assert not records.have_grown(1801 + 800)


def rank(
    number: int, entered: int, *, is_inside: bool, code: int | None = 0, end: bool = False
) -> RankEvidence:
    """A rank by its place in the collectives of both."""
    records = RankRecords(
        rank=number, start=None, steps=(), events=(), error=None, problems=(),
        end=EndRecord(rank=number, steps=1, peak_bytes=1, startup_s=0, wall_s=1) if end else None,
    )  # fmt: skip
    place = Place(
        step=1, operator="all_reduce", label="", group=(0, 1), is_inside=is_inside,
        entered={"0,1": entered},
    )  # fmt: skip
    ours = code is not None and code < 0
    return RankEvidence(
        exit=RankExit(rank=number, code=code, killed_by_harness=ours), records=records, place=place
    )


@pytest.mark.parametrize("end", [False, True])
def test_a_rank_that_others_wait_for_is_named_though_it_ended_well(end: bool) -> None:
    """Exit code 0 is no alibi while another waits in a collective that it never entered."""
    ranks = [rank(0, 4, is_inside=False, end=end), rank(1, 5, is_inside=True, code=-9)]
    what, message, culprit, _ = classify(ranks, timed_out=True, timeout_s=10)
    assert (what, culprit) == ("hang", 0)
    assert "all_reduce" in message
    assert ("before its end record" in message) != end


def test_ranks_that_all_ended_well_left_nobody_behind() -> None:
    """A collective that nobody waited for, in a run that came to its end, is no hang."""
    ranks = [rank(0, 4, is_inside=False, end=True), rank(1, 5, is_inside=True, end=True)]
    assert classify(ranks, timed_out=False, timeout_s=10) == Answer("", "", None)


def test_ranks_that_have_only_to_exit_are_given_a_while() -> None:
    """After `leave_s` they are ended, which is neither a stall nor a timeout."""
    leaving = watch(stall_s=90)
    leaving.leaves(5.0)
    leaving.leaves(20.0)
    assert leaving.deadline_s == 5.0 + Limits().leave_s
    assert not leaving.may_stall(leaving.deadline_s)
    assert leaving.advance(leaving.deadline_s) is not None
    assert not leaving.stalled
    assert not leaving.timed_out


def test_a_process_that_stays_after_its_end_record_is_a_hang() -> None:
    """Nothing passes that its user has to kill."""
    stayed = rank(0, 4, is_inside=False, code=-9, end=True)
    ended, waits = rank(1, 5, is_inside=True, end=True), rank(1, 5, is_inside=True, code=-9)
    for other in (ended, waits):
        answer = classify([stayed, other], timed_out=False, timeout_s=10, stalled_s=5)
        assert answer.what == "hang"
