"""Carrying out a plan with an engine that only pretends: order, sharing, resume, interruption."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine.base import Slots
from harness.errors import Infrastructure, Interrupted, UsageError
from harness.records import (
    CaseSpec,
    ExitCode,
    Outcome,
    RunOutcome,
    RunResult,
    RunSpec,
    Verdict,
    What,
)
from harness.runner.run import advance, execute, execution
from harness.store import RunFolder, begin_run, save_outcome


def spec(name: str = "ref", world_size: int = 2, replica: int = 0) -> RunSpec:
    return RunSpec(
        config={"graph": [], "name": name}, device="cpu", world_size=world_size, timeout_s=1.0,
        replica=replica,
    )  # fmt: skip


def case(case_id: str, world_size: int = 2, skip_reason: str = "") -> CaseSpec:
    return CaseSpec(
        id=case_id, scenario="s", labels={}, reference=spec("ref", world_size),
        control=spec("ref", world_size, replica=1), candidate=spec(case_id, world_size),
        expect="bitwise", checks={}, skip_reason=skip_reason,
    )  # fmt: skip


def ended(run: RunSpec, what: What = "", attempt: int = 0) -> RunOutcome:
    return RunOutcome(
        key=run.key, what=what, message=what, culprit_rank=None, ranks=(), started_unix_s=0.0,
        wall_s=2.0, attempt=attempt,
    )  # fmt: skip


class PretendEngine:
    """Ends the run that started first; `whats` says how, by name of the run."""

    def __init__(self, slots: int = 8, whats: dict[str, What] | None = None) -> None:
        self._slots = Slots(slots)
        self._under_way: list[tuple[RunSpec, Path, int]] = []
        self._whats = whats or {}
        self.started: list[str] = []
        self.num_cancels = 0
        self.before_wait: Callable[[], None] = lambda: None

    @property
    def slots(self) -> int:
        return self._slots.num_slots

    def check(self, spec: RunSpec) -> None:
        self._slots.check(spec)

    def can_start(self, spec: RunSpec) -> bool:
        return self._slots.fits(spec)

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self._slots.take(spec)
        begin_run(folder, spec)
        self._under_way.append((spec, folder, attempt))
        self.started.append(f"{spec.config['name']}{'*' if spec.replica else ''}")

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        self.before_wait()
        if not self._under_way:
            return []
        run, folder, attempt = self._under_way.pop(0)
        self._slots.release(run.key)
        outcome = ended(run, self._whats.get(run.config["name"], ""), attempt)
        save_outcome(folder, outcome)
        return [outcome]

    def cancel(self) -> None:
        self.num_cancels += 1
        while self._under_way:
            self._slots.release(self._under_way.pop()[0].key)

    def close(self) -> None:
        self.cancel()


class Notes:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def run_started(self, spec: RunSpec) -> None:
        self.lines.append(f"start {spec.config['name']}{spec.replica}")

    def run_finished(self, outcome: RunOutcome) -> None:
        self.lines.append(f"end {outcome.what}".strip())

    def judged(self, verdict: Verdict) -> None:
        self.lines.append(f"judged {verdict.case_id} {verdict.outcome}")


def pretend_judge(
    case: CaseSpec, reference: RunResult, control: RunResult, candidate: RunResult
) -> Verdict:
    what = candidate.outcome.what
    outcome: Outcome = "error" if what in ("interrupted", "not_run") else "failed"
    return Verdict(
        case_id=case.id, outcome=outcome if what else "passed", what=what, message="m", checks=(),
        runs={"reference": reference.spec.key, "control": control.spec.key,
              "candidate": candidate.spec.key}, wall_s=0.0,
    )  # fmt: skip


def make_folder(tmp_path: Path, *cases: CaseSpec) -> RunFolder:
    return RunFolder.create(tmp_path / "out", {}, "", cases)


def go(
    folder: RunFolder,
    engine: PretendEngine,
    notes: Notes | None = None,
    *,
    exit_first: bool = False,
) -> dict[str, str]:
    verdicts = execute(
        folder, folder.cases, engine, notes or Notes(), exit_first=exit_first, judge=pretend_judge
    )
    return {v.case_id: v.outcome for v in verdicts}


def test_a_case_is_judged_as_soon_as_its_runs_are_done(tmp_path: Path) -> None:
    """The first verdict does not wait for the last run, nor do slots for the first verdict."""
    notes = Notes()
    go(make_folder(tmp_path, case("a"), case("b")), PretendEngine(slots=2), notes)
    assert notes.lines == [
        "start ref0", "end", "start ref1", "end", "start a0", "end", "start b0",
        "judged a passed", "end", "judged b passed",
    ]  # fmt: skip


def test_shared_runs_are_made_once_and_never_again(tmp_path: Path) -> None:
    """Five runs for three candidates; one crash fails its case; all is stored, with its seconds."""
    folder = make_folder(tmp_path, case("a"), case("b"), case("c"))
    engine = PretendEngine(whats={"b": "hang"})
    first = go(folder, engine)
    assert sorted(engine.started) == ["a", "b", "c", "ref", "ref*"]
    assert first == {"a": "passed", "b": "failed", "c": "passed"}
    stored = folder.load_verdict("a")
    assert stored is not None
    assert stored.wall_s == 6.0
    assert (folder.case_folder("a") / "candidate" / "outcome.json").is_file()
    engine, notes = PretendEngine(), Notes()
    assert go(folder, engine, notes) == first
    assert engine.started == []
    assert notes.lines == ["judged a passed", "judged b failed", "judged c passed"]


def test_resume_makes_only_what_is_missing(tmp_path: Path) -> None:
    """Finished runs are kept, unfinished ones set aside with what they recorded and made anew."""
    folder = make_folder(tmp_path, case("a"), case("b"))
    for run in (spec("ref"), spec("a")):
        begin_run(folder.run_folder(run.key), run)
        save_outcome(folder.run_folder(run.key), ended(run))
    begin_run(folder.run_folder(spec("b").key), spec("b"))
    (folder.run_folder(spec("b").key) / "rank0.jsonl").write_text("half a li")
    engine = PretendEngine()
    assert go(folder, engine) == {"a": "passed", "b": "passed"}
    assert sorted(engine.started) == ["b", "ref*"]
    kept = folder.path / "runs" / f"{spec('b').key}.attempt0" / "rank0.jsonl"
    assert kept.read_text() == "half a li"
    outcome = folder.finished(spec("b").key)
    assert outcome is not None
    assert outcome.attempt == 1


def test_a_real_failure_is_never_retried(tmp_path: Path) -> None:
    """A crash, a hang or a divergence stays on resume; only the machine's doing is made again."""
    folder = make_folder(tmp_path, case("a"), case("b"), case("c"))
    whats: dict[str, What] = {"a": "crashed", "b": "interrupted", "c": "not_run"}
    assert go(folder, PretendEngine(whats=whats)) == {"a": "failed", "b": "error", "c": "error"}
    engine = PretendEngine()
    assert go(folder, engine) == {"a": "failed", "b": "passed", "c": "passed"}
    assert engine.started == ["b", "c"]


def test_a_skipped_case_runs_nothing(tmp_path: Path) -> None:
    """A case with a reason to skip is answered with it, and its runs are not made."""
    engine = PretendEngine()
    folder = make_folder(tmp_path, case("big", 64, skip_reason="needs 64 GPUs"), case("a"))
    assert go(folder, engine) == {"big": "skipped", "a": "passed"}
    assert len(engine.started) == 3
    verdict = folder.load_verdict("big")
    assert verdict is not None
    assert verdict.message == "needs 64 GPUs"


def test_too_big_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A run that can never fit is a usage error while the folder is still untouched."""
    engine = PretendEngine(slots=4)
    folder = make_folder(tmp_path, case("a"), case("big", 8))
    with pytest.raises(UsageError, match="needs 8 slots"):
        go(folder, engine)
    assert engine.started == []
    assert not (folder.path / "runs").exists()


@pytest.mark.parametrize("what", ["crashed", "interrupted"])
def test_exit_first_stops_after_the_first_failure(tmp_path: Path, what: What) -> None:
    """With -x runs under way are killed, later cases have no verdict, and resume goes on."""
    folder = make_folder(tmp_path, case("a"), case("b"), case("c"))
    engine = PretendEngine(slots=4, whats={"a": what})
    got = go(folder, engine, exit_first=True)
    assert list(got) == ["a"]
    assert got["a"] != "passed"
    assert engine.num_cancels == 1
    engine = PretendEngine()
    if what == "crashed":  # a failure that is stored stops as well as a new one
        assert go(folder, engine, exit_first=True) == {"a": "failed"}
        assert engine.started == []
    go(folder, engine)
    assert [v.case_id for v in folder.verdicts()] == ["a", "b", "c"]


class Impatient(PretendEngine):
    """Is signalled once more while it kills runs: that must not cut the killing short."""

    def cancel(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_kills_the_runs_and_keeps_what_is_done(tmp_path: Path, number: int) -> None:
    """Ctrl-C or SIGTERM cancels, ends as Interrupted, keeps verdicts, and restores handlers."""
    folder = make_folder(tmp_path, case("a"), case("b"))
    engine, notes = Impatient(slots=2), Notes()

    def interrupt() -> None:
        if "judged a passed" in notes.lines:
            os.kill(os.getpid(), number)

    engine.before_wait = interrupt
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=r"1 of 2 cases are done; go on with --resume") as caught:
        go(folder, engine, notes)
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert signal.getsignal(number) is before
    assert engine.num_cancels == 1
    assert [v.case_id for v in folder.verdicts()] == ["a"]
    again = PretendEngine()
    assert go(folder, again) == {"a": "passed", "b": "passed"}
    assert again.started == ["b"]


class Forgetful(PretendEngine):
    """Has nothing to wait for."""

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        return []


class Full(PretendEngine):
    """Cannot write."""

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        raise Infrastructure("cannot write x: No space left on device")


@pytest.mark.parametrize(("kind", "why"), [(Full, "No space left"), (Forgetful, "3 runs are left")])
def test_an_engine_that_fails_cancels_its_runs(
    tmp_path: Path, kind: type[PretendEngine], why: str
) -> None:
    """The error comes through; runs that are missing must not end in green."""
    engine = kind()
    with pytest.raises(Infrastructure, match=why):
        go(make_folder(tmp_path, case("a")), engine)
    assert engine.num_cancels == 1


def test_a_judge_that_fails_costs_one_verdict(tmp_path: Path) -> None:
    """A mistake in a check is an error of that case, with its traceback, not of the matrix."""

    def broken(
        case: CaseSpec, reference: RunResult, control: RunResult, candidate: RunResult
    ) -> Verdict:
        if case.id == "a":
            raise ZeroDivisionError("oops")
        return pretend_judge(case, reference, control, candidate)

    folder = make_folder(tmp_path, case("a"), case("b"))
    verdicts = execute(folder, folder.cases, PretendEngine(), Notes(), judge=broken)
    assert [v.outcome for v in verdicts] == ["error", "passed"]
    assert "ZeroDivisionError: oops" in verdicts[0].message
    assert "Traceback" in (folder.case_folder("a") / "judge_error.txt").read_text()
    assert go(folder, PretendEngine()) == {"a": "passed", "b": "passed"}


def test_two_harnesses_on_one_folder_are_refused(tmp_path: Path) -> None:
    """Whoever comes second on a folder starts nothing."""
    folder = make_folder(tmp_path, case("a"))
    other, engine = RunFolder.open(folder.path), PretendEngine()
    with pytest.raises(UsageError, match="in use by another harness"):
        go(other, engine)
    assert engine.started == []


@pytest.mark.parametrize("how", ["closed", "signal"])
def test_rounds_go_on_until_there_is_enough(tmp_path: Path, how: str) -> None:
    """Whoever has enough leaves the rest for later; runs under way end with the rounds.

    A signal that comes between two rounds interrupts as one that comes while a run is waited for.
    """
    folder, engine = make_folder(tmp_path, case("a"), case("b"), case("c")), PretendEngine(slots=2)
    rounds = execution(folder, folder.cases, engine, Notes(), judge=pretend_judge)

    def stop_here() -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    assert advance(rounds, lambda: bool(folder.verdicts())) is None
    assert [verdict.case_id for verdict in folder.verdicts()] == ["a"]
    assert engine.started == ["ref", "ref*", "a", "b"]
    if how == "closed":
        rounds.close()
    else:
        with pytest.raises(Interrupted, match="1 of 3 cases are done"):
            advance(rounds, stop_here)
    assert engine.num_cancels == 1
    assert advance(rounds) is None
    assert len(folder.verdicts()) == 1
