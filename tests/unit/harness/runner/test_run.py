"""Carrying out a plan with an engine that only pretends: order, sharing, resume, interruption."""

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
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
from harness.repeats import is_timed
from harness.runner.run import Silent, advance, execute, execution
from harness.store import RunFolder, begin_run, save_outcome
from tests.support.fake_engine import Capsys, FakeEngine, Spoil, other_bits, run_json


def spec(name: str = "ref", world_size: int = 2, replica: int = 0) -> RunSpec:
    graph = [] if name == "ref" else [name]
    return RunSpec(
        config={"graph": graph}, device="cpu", world_size=world_size, timeout_s=1.0, replica=replica
    )


def case(case_id: str, world_size: int = 2, skip_reason: str = "") -> CaseSpec:
    return CaseSpec(
        id=case_id, scenario="s", labels={}, reference=spec("ref", world_size),
        control=spec("ref", world_size, replica=1), candidate=spec(case_id, world_size),
        expect="bitwise", checks={}, skip_reason=skip_reason,
    )  # fmt: skip


class Notes(Silent):
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.started: list[str] = []

    def run_started(self, spec: RunSpec) -> None:
        self.started.append("".join(spec.config["graph"] or ["ref"]) + "*" * spec.replica)
        self.lines.append(f"start {self.started[-1]}")

    def run_finished(self, outcome: RunOutcome) -> None:
        self.lines.append(f"end {outcome.what}".strip())

    def judged(self, verdict: Verdict) -> None:
        self.lines.append(f"judged {verdict.case_id} {verdict.outcome}")


def plain_judge(
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


def busy(slots: int = 8, **ends: What) -> FakeEngine:
    """An engine with as many runs under way as fit."""
    engine = FakeEngine(slots, jobs=None)
    engine.ends = ends
    return engine


def go(folder: RunFolder, engine: FakeEngine | None = None, **options: Any) -> tuple[Any, Notes]:
    """Outcomes by case, and what was heard meanwhile."""
    notes = options.pop("notes", Notes())
    options = {"judge": plain_judge, **options}
    verdicts = execute(folder, folder.cases, engine or busy(), notes, **options)
    return {v.case_id: v.outcome for v in verdicts}, notes


def test_a_case_is_judged_as_soon_as_its_runs_are_done(tmp_path: Path) -> None:
    """The first verdict does not wait for the last run, nor do slots for the first verdict."""
    _, notes = go(make_folder(tmp_path, case("a"), case("b")), busy(slots=2))
    assert notes.lines == [
        "start ref", "end", "start ref*", "end", "start a", "end", "start b", "judged a passed",
        "end", "judged b passed",
    ]  # fmt: skip


def test_shared_runs_are_made_once_and_only_what_the_machine_did_again(tmp_path: Path) -> None:
    """A crash or a hang stays on resume, an interruption does not; all is stored, with seconds."""
    folder = make_folder(tmp_path, *map(case, "abcd"))
    first, notes = go(folder, busy(b="hang", c="interrupted", d="not_run"))
    assert first == {"a": "passed", "b": "failed", "c": "error", "d": "error"}
    assert notes.started == ["ref", "ref*", "a", "b", "c", "d"]
    stored = folder.load_verdict("a")
    assert stored is not None
    assert stored.wall_s == 1.5
    assert (folder.case_folder("a") / "candidate" / "outcome.json").is_file()
    again, notes = go(folder)
    assert again == {"a": "passed", "b": "failed", "c": "passed", "d": "passed"}
    assert notes.started == ["c", "d"]
    assert go(folder)[1].lines == [f"judged {name} {again[name]}" for name in "abcd"]


def test_resume_keeps_what_unfinished_runs_recorded(tmp_path: Path) -> None:
    """Finished runs are kept, unfinished ones set aside with what they recorded and made anew."""
    folder = make_folder(tmp_path, case("a"), case("b"))
    for run in (spec("ref"), spec("a")):
        begin_run(folder.run_folder(run.key), run)
        save_outcome(folder.run_folder(run.key), FakeEngine().ending(run, Path(), 0))
    begin_run(folder.run_folder(spec("b").key), spec("b"))
    (folder.run_folder(spec("b").key) / "rank0.jsonl").write_text("half a li")
    found, notes = go(folder)
    assert (found, sorted(notes.started)) == ({"a": "passed", "b": "passed"}, ["b", "ref*"])
    kept = folder.path / "runs" / f"{spec('b').key}.attempt0" / "rank0.jsonl"
    assert kept.read_text() == "half a li"
    assert getattr(folder.finished(spec("b").key), "attempt", None) == 1


def test_a_skipped_case_runs_nothing_and_one_too_big_is_refused(tmp_path: Path) -> None:
    """The reason is the answer; a run that never fits is refused while the folder is untouched."""
    folder = make_folder(tmp_path, case("big", 64, skip_reason="needs 64 GPUs"), case("a"))
    found, notes = go(folder)
    assert (found, len(notes.started)) == ({"big": "skipped", "a": "passed"}, 3)
    assert getattr(folder.load_verdict("big"), "message", "") == "needs 64 GPUs"
    folder = make_folder(tmp_path / "other", case("a"), case("big", 8))
    with pytest.raises(UsageError, match="needs 8 slots"):
        go(folder, busy(slots=4))
    assert not (folder.path / "runs").exists()


@pytest.mark.parametrize("what", ["crashed", "interrupted"])
def test_exit_first_stops_after_the_first_failure(tmp_path: Path, what: What) -> None:
    """With -x runs under way are killed, later cases have no verdict, and resume goes on."""
    folder, engine = make_folder(tmp_path, *map(case, "abc")), busy(slots=4, a=what)
    found, _ = go(folder, engine, exit_first=True)
    assert (list(found), found["a"] == "passed", engine.cancelled) == (["a"], False, 1)
    if what == "crashed":  # a failure that is stored stops as well as a new one
        again, notes = go(folder, exit_first=True)
        assert (again, notes.started) == ({"a": "failed"}, [])
    go(folder)
    assert [v.case_id for v in folder.verdicts()] == ["a", "b", "c"]


class Impatient(FakeEngine):
    """Is signalled once more while it kills runs: that must not cut the killing short."""

    def cancel(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_kills_the_runs_and_keeps_what_is_done(tmp_path: Path, number: int) -> None:
    """It cancels, ends as Interrupted, keeps verdicts, and restores handlers."""
    folder, engine = make_folder(tmp_path, case("a"), case("b")), Impatient(2, jobs=None)
    notes, before = Notes(), signal.getsignal(number)
    engine.on_wait = lambda: (
        os.kill(os.getpid(), number) if "judged a passed" in notes.lines else None
    )
    with pytest.raises(Interrupted, match=r"1 of 2 cases are done; go on with --resume") as caught:
        go(folder, engine, notes=notes)
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert (signal.getsignal(number), engine.cancelled) == (before, 1)
    assert [v.case_id for v in folder.verdicts()] == ["a"]
    found, notes = go(folder)
    assert (found, notes.started) == ({"a": "passed", "b": "passed"}, ["b"])


def full_disk() -> None:
    raise Infrastructure("cannot write x: No space left on device")


@pytest.mark.parametrize("why", ["No space left", "3 runs are left"])
def test_an_engine_that_fails_cancels_its_runs(tmp_path: Path, why: str) -> None:
    """The error comes through; runs that are missing must not end in green."""
    engine = busy()
    engine.on_wait = full_disk if "space" in why else engine.under_way.clear
    with pytest.raises(Infrastructure, match=why):
        go(make_folder(tmp_path, case("a")), engine)
    assert engine.cancelled == 1


def test_a_judge_that_fails_costs_one_verdict(tmp_path: Path) -> None:
    """A mistake in a check is an error of that case, with its traceback, not of the matrix."""

    def broken(case: CaseSpec, *runs: RunResult) -> Verdict:
        return plain_judge(case, *runs) if case.id != "a" else 1 / 0  # type: ignore[return-value]

    folder = make_folder(tmp_path, case("a"), case("b"))
    assert go(folder, judge=broken)[0] == {"a": "error", "b": "passed"}
    assert "ZeroDivisionError: " in getattr(folder.load_verdict("a"), "message", "")
    assert "Traceback" in (folder.case_folder("a") / "judge_error.txt").read_text()
    assert go(folder)[0] == {"a": "passed", "b": "passed"}


def test_two_harnesses_on_one_folder_are_refused(tmp_path: Path) -> None:
    """Whoever comes second on a folder starts nothing."""
    folder, engine = make_folder(tmp_path, case("a")), busy()
    with pytest.raises(UsageError, match="in use by another harness"):
        go(RunFolder.open(folder.path), engine)
    assert engine.made == []


@pytest.mark.parametrize("how", ["closed", "signal"])
def test_rounds_go_on_until_there_is_enough(tmp_path: Path, how: str) -> None:
    """Whoever has enough leaves the rest for later; runs under way end with the rounds.

    A signal that comes between two rounds interrupts as one that comes while a run is waited for.
    """
    folder, engine = make_folder(tmp_path, *map(case, "abc")), busy(slots=2)
    rounds = execution(folder, folder.cases, engine, Notes(), judge=plain_judge)

    def stop_here() -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    assert advance(rounds, lambda: bool(folder.verdicts())) is None
    assert [verdict.case_id for verdict in folder.verdicts()] == ["a"]
    assert len(engine.made) == 4
    if how == "closed":
        rounds.close()
    else:
        with pytest.raises(Interrupted, match="1 of 3 cases are done"):
            advance(rounds, stop_here)
    assert engine.cancelled == 1
    assert advance(rounds) is None
    assert len(folder.verdicts()) == 1


# ---- timed repeats: made alone, in turn, after all others, and judged

TIMED = """\
name: timed
why: A graph must not be slower.
base: {steps: 9}
axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [attn], [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}, throughput: {max_slowdown: 0.05}}
launch: {device: cpu, slots: 4, timeout_s: 60}
"""
OUT = ("--out", "out", "--no-history")


def test_timed_runs_are_alone_and_last(engine: FakeEngine, capsys: Capsys) -> None:
    """Other runs start side by side, a repeat when nothing is under way, even to confirm.

    Cases of one rank fail and are confirmed while those of two are being timed.
    """
    Path("timed.yaml").write_text(TIMED)
    engine.jobs, order = None, list[tuple[RunSpec, list[RunSpec]]]()
    engine.on_start = lambda spec: order.append((spec, [s for s, _, _ in engine.under_way]))
    code, answer = run_json(capsys, "run", "timed.yaml", *OUT)
    assert code == ExitCode.PASSED
    assert [is_timed(s) for s, _ in order] == [False] * 8 + [True] * 36  # 2 layouts x 3 x 6
    assert any(others for _, others in order[:8])
    assert not any(others for _, others in order[8:])
    rounds = [s.config["graph"] for s, _ in order[8:14]]
    assert rounds[:3] == rounds[:2:-1]  # there and back
    for verdict in answer["verdicts"]:
        assert {"repeats", "throughput"} <= {check["check"] for check in verdict["checks"]}
    order.clear()
    engine.spoil = lambda spec, record: (
        other_bits(record) if spec.config["graph"] and spec.world_size == 1 else record
    )
    confirmed = ("--set", "launch.confirm=true", "--out", "confirmed", "--no-history")
    assert main(["run", "timed.yaml", *confirmed]) == ExitCode.FAILED
    assert sum(s.replica == -1 for s, _ in order) == 3
    assert not [s for s, others in order if others and any(map(is_timed, [s, *others]))]


def once(graph: list[str], replica: int) -> Spoil:
    """One repeat of one side has other weights in its step 7."""
    return lambda spec, record: (
        other_bits(record)
        if (spec.replica, spec.config["graph"], record.step) == (replica, graph, 7) else record
    )  # fmt: skip


def slow(factor: Callable[[RunSpec], float]) -> Spoil:
    """Steps take so much longer."""
    return lambda spec, record: dataclasses.replace(record, step_s=record.step_s * factor(spec))


@pytest.mark.parametrize(
    ("spoil", "code", "what"),
    [
        (slow(lambda spec: 1.04 if spec.config["graph"] else 1.0), 0, ""),
        (slow(lambda spec: 1.06 if spec.config["graph"] else 1.0), 1, "throughput_regression"),
        (slow(lambda spec: 1.0 + int(spec.key[-3:], 16) % 7), 6, "noisy"),
        (once(["attn"], 4), 1, "diverged"),
        (once([], 3), 6, "nondeterministic_reference"),
    ],
)
def test_what_repeats_say(
    engine: FakeEngine, capsys: Capsys, spoil: Spoil, code: int, what: str
) -> None:
    """A slow graph fails past the tolerance, scatter is no verdict, other bits are found."""
    Path("timed.yaml").write_text(TIMED)
    engine.spoil = spoil
    found, answer = run_json(capsys, "run", "timed.yaml", *OUT, "-k", "dp1 and attn")
    (verdict,) = answer["verdicts"]
    assert (found, verdict["what"]) == (code, what)
    if what == "diverged":
        assert verdict["message"].startswith("repeat 2 of the candidate")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("steps: 9", "steps: 7"), "skip_steps + 3 = 8 or more to time"),
        (("max_slowdown: 0.05", "skip_steps: 2"), "3 or more, as graphs are captured"),
        (("max_slowdown: 0.05", "repeats: 5"), "an integer from 6 to 50"),
        (("max_slowdown: 0.05", "max_slowdown: 0"), "a number > 0"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    tmp_path: Path, capsys: Capsys, change: tuple[str, str], words: str
) -> None:
    """Before anything runs: too few steps or repeats, or warm-up among the steps that count."""
    path = tmp_path / "timed.yaml"
    path.write_text(TIMED.replace(*change))
    assert main(["run", str(path), "--dry-run"]) == ExitCode.USAGE
    assert words in capsys.readouterr().err
