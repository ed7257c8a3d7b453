"""Carrying out a plan with an engine that only pretends: order, resume, repeats, confirmation."""

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.checks.judge import confirmation_words
from harness.cli import main
from harness.errors import Infrastructure, Interrupted, UsageError
from harness.history.ledger import gather
from harness.records import (
    CaseSpec,
    Confirmation,
    ExitCode,
    Outcome,
    RunOutcome,
    RunResult,
    RunSpec,
    StepRecord,
    Verdict,
    What,
)
from harness.repeats import CONFIRMING, confirming_runs, is_timed
from harness.runner.run import View, execute
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario
from harness.store import OUTCOME_FILE, RunFolder, begin_run, set_aside
from harness.store.folder import inspect
from reports import html, json_report, junit, markdown
from reports.reading import summarise
from tests.support.fake_engine import Capsys, FakeEngine, Patch, Spoil, other_bits, run_json
from tests.support.fake_engine import unequal as unequal_weight
from tests.support.records import case_spec, run_spec, verdict


def spec(name: str = "ref", world_size: int = 2, replica: int = 0) -> RunSpec:
    graph = [] if name == "ref" else [name]
    return run_spec(world_size, config={"graph": graph}, replica=replica)


def case(case_id: str, world_size: int = 2, skip_reason: str = "") -> CaseSpec:
    reference, control = (spec("ref", world_size, replica) for replica in range(2))
    candidate = spec(case_id, world_size)
    return case_spec(case_id, reference, control, candidate, skip_reason=skip_reason)


class Notes(View):
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
    how: Outcome = "error" if what in ("interrupted", "not_run") else "failed"
    return verdict(case.id, outcome=how if what else "passed", what=what)


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


def test_what_was_planned_otherwise_is_not_skipped(tmp_path: Path) -> None:
    """A plan that now skips a case does not answer for one whose runs were to be judged."""
    made = make_folder(tmp_path / "made", case("a"))
    go(made)
    folder = make_folder(tmp_path / "now", case("a", skip_reason="not today"), case("b"))
    assert go(folder)[0] == {"a": "skipped", "b": "passed"}
    assert go(folder)[0] == {"a": "skipped", "b": "passed"}
    shutil.rmtree(folder.case_folder("a"))
    shutil.copytree(made.case_folder("a"), folder.case_folder("a"))
    assert go(folder)[0] == {"a": "error", "b": "passed"}


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
    told = "1 of 2 cases are done; go on with: harness run --resume"
    with pytest.raises(Interrupted, match=told) as caught:
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
    """Other runs start side by side, a repeat when nothing is under way, even to confirm."""
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
    for judged in answer["verdicts"]:
        assert {"repeats", "throughput"} <= {check["check"] for check in judged["checks"]}
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
    (judged,) = answer["verdicts"]
    assert (found, judged["what"]) == (code, what)
    if what == "diverged":
        assert judged["message"].startswith("repeat 2 of the candidate")


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


RUN = ("run", "small.yaml", "--out", "r", "--no-history", "--set", "launch.confirm=true")
RESUME = ("run", "--resume", "r", "--no-history")
FAILING = "dp2-attn"


def unequal(spec: RunSpec, record: StepRecord) -> StepRecord:
    """One weight of rank 1 of dp2-attn, from step 2 on."""
    return unequal_weight(spec, record) if spec.world_size == 2 else record


def only(replica: int) -> Spoil:
    """The fault in runs of one replica number alone: 0 is the first run."""
    return lambda spec, record: unequal(spec, record) if spec.replica == replica else record


def other_each_time(spec: RunSpec, record: StepRecord) -> StepRecord:
    """The same place, other bits."""
    found = unequal(spec, record)
    return found if found is record else other_bits(record, digit=str(abs(spec.replica)))


def late(spec: RunSpec, record: StepRecord) -> StepRecord:
    """Always the same first difference; in the repeat the last step differs, too."""
    found = unequal(spec, record)
    is_late = spec.replica == CONFIRMING and record.step == 3 and found is not record
    return other_bits(found, digit="1") if is_late else found


def drifting_reference(spec: RunSpec, record: StepRecord) -> StepRecord:
    """The reference equals its control, and its repeat does not."""
    if spec.replica == CONFIRMING and not spec.config["graph"] and not record.step:
        return other_bits(record, "grads", "2")
    return unequal(spec, record)


def verdict_of(case_id: str = FAILING, folder: str = "r") -> Verdict:
    found = RunFolder.open(Path(folder)).load_verdict(case_id)
    assert found is not None
    return found


def confirmed(case_id: str = FAILING) -> Confirmation:
    found = verdict_of(case_id).confirmation
    assert found is not None
    return found


def repeats() -> list[RunSpec]:
    case = next(c for c in RunFolder.open(Path("r")).cases if c.id == FAILING)
    return list(confirming_runs(case).values())


def num_repeats(engine: FakeEngine) -> int:
    return sum(f"-r{CONFIRMING}-" in key for key in engine.made)


@pytest.mark.parametrize(
    ("spoil", "outcome", "reference", "candidate"),
    [
        (unequal, "came_again", True, True),
        (only(0), "did_not_come_again", True, False),
        (other_each_time, "differs_otherwise", True, False),
        (late, "came_again", True, False),
        (drifting_reference, "differs_otherwise", False, True),
    ],
)  # fmt: skip
def test_the_repeats_say_whether_the_difference_comes_again(
    engine: FakeEngine, spoil: Spoil, outcome: str, reference: bool, candidate: bool
) -> None:
    """The case stays failed, whatever the repeats say; they name who does not repeat itself."""
    engine.spoil = spoil
    assert main([*RUN]) == ExitCode.FAILED
    verdict, found = verdict_of(), confirmed()
    assert (verdict.outcome, verdict.what, num_repeats(engine)) == ("failed", "diverged", 2)
    repeat = (found.outcome, found.reference_repeats, found.candidate_repeats)
    assert repeat == (outcome, reference, candidate)
    assert (found.difference == verdict.difference) == (outcome == "came_again")
    assert (found.difference is None) == (outcome == "did_not_come_again")
    assert set(found.runs.values()) == {spec.key for spec in repeats()}
    assert (inspect(Path("r")).damage, inspect(Path("r")).num_runs) == ((), 8 + 2)
    set_aside(Path("r", "runs", found.runs["candidate"]))  # one of the files checked
    assert any(found.runs["candidate"] in line for line in inspect(Path("r")).damage)


@pytest.mark.parametrize(
    ("what", "args"),
    [("", RUN), ("diverged", RUN[:-2]), ("crashed", RUN), ("nondeterministic_reference", RUN)],
)
def test_nothing_else_is_confirmed(engine: FakeEngine, what: Any, args: tuple[str, ...]) -> None:
    """Not a pass, nor what nobody wants confirmed, nor other ends, which are explained."""
    engine.spoil = unequal if what else engine.spoil
    if what == "crashed":
        engine.ends = {"attn": what}
    if what == "nondeterministic_reference":
        engine.spoil = lambda spec, record: (
            other_bits(record) if spec.replica == 1 else unequal(spec, record)
        )
    main([*args])
    assert (verdict_of().what, verdict_of().confirmation, num_repeats(engine)) == (what, None, 0)


def test_a_repeat_that_does_not_end_confirms_nothing(
    engine: FakeEngine, monkeypatch: Patch
) -> None:
    """The evidence names its end; the case stays failed, and --resume makes nothing again."""
    engine.spoil, ending = unequal, engine.ending

    def crashes(spec: RunSpec, folder: Path, attempt: int) -> RunOutcome:
        engine.ends = {"attn": "crashed"} if spec.replica == CONFIRMING else {}
        return ending(spec, folder, attempt)

    monkeypatch.setattr(engine, "ending", crashes)
    assert main([*RUN]) == ExitCode.FAILED
    found, made = confirmed(), len(engine.made)
    assert (found.outcome, found.what, found.candidate_repeats) == ("not_made", "crashed", None)
    assert main([*RESUME]) == ExitCode.FAILED
    assert (len(engine.made), confirmed()) == (made, found)


def test_a_tolerance_is_not_confirmed(engine: FakeEngine) -> None:
    """Bits that differ by design would come again in every right program."""
    text = Path("small.yaml").read_text().replace("timeout_s: 60", "timeout_s: 60, confirm: true")
    for expect in ("bitwise", "{rtol: 1.0e-5, atol: 0.0}"):
        Path("small.yaml").write_text(text.replace("expect: bitwise", f"expect: {expect}"))
        cases = expand(load_scenario(Path("small.yaml")), "cpu")
        assert {case.confirm for case in cases} == {expect == "bitwise"}


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_an_interrupted_confirmation_is_resumed(
    engine: FakeEngine, capsys: Capsys, side: str
) -> None:
    """Stopped in a repeat: the failure is stored, what was begun kept, what is missing made."""
    engine.spoil = unequal

    def stop(spec: RunSpec) -> None:
        if spec.replica == CONFIRMING and bool(spec.config["graph"]) == (side == "candidate"):
            begin_run(RunFolder.open(Path("r")).run_folder(spec.key), spec)
            raise KeyboardInterrupt

    engine.on_start = stop
    assert main([*RUN]) == ExitCode.INTERRUPTED
    stored = verdict_of()
    assert (stored.outcome, confirmed().outcome) == ("failed", "not_made")
    assert not inspect(Path("r")).damage
    engine.on_start = lambda spec: None
    engine.made.clear()
    found, _ = run_json(capsys, "bisect", FAILING, "r", "--out", "b", "--until", "causes")
    assert (found, bool(engine.made), num_repeats(engine)) == (ExitCode.FAILED, True, 0)
    before = {path: path.read_bytes() for path in Path("r").glob("*/*/*.json*")}
    left = {s.key for s in repeats() if not Path("r/runs", s.key, OUTCOME_FILE).exists()}
    code, plan = run_json(capsys, "run", "--resume", "r", "--dry-run")
    assert (code, {run["key"] for run in plan["runs"]} & {s.key for s in repeats()}) == (0, left)
    engine.made.clear()
    assert main([*RESUME]) == ExitCode.FAILED
    assert set(engine.made) == {run["key"] for run in plan["runs"]}
    assert confirmed().outcome == "came_again"
    assert dataclasses.replace(verdict_of(), confirmation=stored.confirmation) == stored
    for path, content in before.items():
        if path.parent.name in left:
            path = Path("r/runs", f"{path.parent.name}.attempt0", path.name)
        assert path.read_bytes() == content or path.parent.name == FAILING, path


def test_every_output_shows_it(engine: FakeEngine, capsys: Capsys) -> None:
    """Terminal, page, summary, JUnit, JSON, `show`, history, a merged folder, and a rerun."""
    engine.spoil = only(0)
    main([*RUN])
    found = confirmed()
    words = confirmation_words(found)
    out = capsys.readouterr().out
    assert any(words in line for line in out.splitlines())  # as the case is answered
    assert " ".join(out.split()).count(words) == 2  # and in the table at the end, folded
    main(["show", FAILING, "r"])
    assert words in " ".join(capsys.readouterr().out.split())
    report = summarise(Path("r"))
    assert words in junit.render(report)
    assert words in html.render(report)
    assert words.replace("_", "") in markdown.render(report).replace("\\", "").replace("_", "")
    (plain,) = (c for c in json.loads(json_report.render(report))["cases"] if c["id"] == FAILING)
    assert plain["verdict"]["confirmation"] == found.to_json()
    (entry,) = (e for e in gather(RunFolder.open(Path("r"))).cases if e.case_id == FAILING)
    assert f"confirmation: {found.outcome}" in entry.causes
    assert run_json(capsys, "merge", "r", "--out", "merged")[0] == ExitCode.FAILED
    assert verdict_of(folder="merged") == verdict_of()
    assert not inspect(Path("merged")).damage
    code, answer = run_json(capsys, "rerun", f"r/cases/{FAILING}", "--out", "again")
    (verdict,) = answer["verdicts"]  # the case's own file says that it wants it
    assert (code, verdict["confirmation"]["outcome"]) == (ExitCode.FAILED, found.outcome)
