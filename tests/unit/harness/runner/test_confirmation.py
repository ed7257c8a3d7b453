"""`launch.confirm`: a difference of bits is followed by one more run of both sides, as evidence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.checks import confirmation
from harness.cli import main
from harness.history.gathering import gather
from harness.records import Confirmation, ExitCode, RunOutcome, RunSpec, StepRecord, Verdict
from harness.repeats import CONFIRMING, confirming_runs
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario
from harness.store import OUTCOME_FILE, RunFolder, begin_run
from harness.store.verify import inspect
from reports import html, json_report, junit, markdown
from reports.reading import summarise
from tests.support.fake_engine import Capsys, FakeEngine, Patch, Spoil, other_bits, run_json
from tests.support.fake_engine import unequal as unequal_weight

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
    RunFolder.open(Path("r")).set_aside(found.runs["candidate"])  # one of the files checked
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


@pytest.mark.parametrize("expect", ["bitwise", "{rtol: 1.0e-5, atol: 0.0}"])
def test_a_tolerance_is_not_confirmed(engine: FakeEngine, expect: str) -> None:
    """Bits that differ by design would come again in every right program."""
    path = Path("small.yaml")
    text = path.read_text().replace("expect: bitwise", f"expect: {expect}")
    path.write_text(text.replace("timeout_s: 60", "timeout_s: 60, confirm: true"))
    cases = expand(load_scenario(path), "cpu")
    assert {case.confirm for case in cases} == {expect == "bitwise"}


def test_cases_share_the_repeat_of_their_reference(engine: FakeEngine) -> None:
    """Two candidates of one reference fail: three repeats, not four."""
    engine.spoil = lambda spec, record: (
        other_bits(record) if spec.config["graph"] and spec.world_size == 2 else record
    )
    assert main([*RUN]) == ExitCode.FAILED
    assert num_repeats(engine) == 3
    assert {confirmed(i).outcome for i in (FAILING, "dp2-full_iteration")} == {"came_again"}


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


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_an_interrupted_confirmation_is_resumed(
    engine: FakeEngine, capsys: Capsys, side: str
) -> None:
    """Stopped in a repeat: the failure is stored, what was begun kept, what is missing made.

    A bisection makes none of the repeats: the runs of a search are its own.
    """
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
    words = confirmation.words(found)
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
