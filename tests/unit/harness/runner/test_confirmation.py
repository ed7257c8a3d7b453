"""`launch.confirm`: a difference of bits is followed by one more run of both sides, as evidence."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.checks import confirmation
from harness.cli import main
from harness.history.gathering import gather
from harness.records import ExitCode, RunSpec, StepRecord, Verdict, What
from harness.repeats import CONFIRMING, confirming_runs, is_timed
from harness.runner import launch
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario
from harness.store import OUTCOME_FILE, RunFolder, begin_run
from harness.store.verify import inspect
from reports import html, json_report, junit, markdown
from reports.reading import summarise
from tests.unit.harness.fake_engine import SCENARIO, FakeEngine, run_json
from tests.unit.harness.fake_engine import unequal as unequal_weight
from tests.unit.harness.runner.test_timed_runs import SCENARIO as TIMED_SCENARIO
from tests.unit.harness.runner.test_timed_runs import BusyEngine

Spoil = Callable[[RunSpec, StepRecord], StepRecord]
CONFIRM = ("--set", "launch.confirm=true")
RUN = ("run", "small.yaml", "--out", "r", "--no-history", *CONFIRM)
FAILING = "dp2-attn"


def unequal(spec: RunSpec, record: StepRecord) -> StepRecord:
    """One weight of rank 1 of dp2-attn, from step 2 on."""
    return unequal_weight(spec, record) if spec.world_size == 2 else record


def only(replica: int, spoil: Spoil = unequal) -> Spoil:
    """The fault in runs of one replica number alone: 0 is the first run."""
    return lambda spec, record: spoil(spec, record) if spec.replica == replica else record


def other_each_time(spec: RunSpec, record: StepRecord) -> StepRecord:
    """The same place, other bits."""
    found = unequal(spec, record)
    if found is record:
        return record
    return dataclasses.replace(
        record, digests=record.digests | {"weights": f"{abs(spec.replica):032}"}
    )


def late(spec: RunSpec, record: StepRecord) -> StepRecord:
    """Always the same first difference; in the repeat the last step differs, too."""
    found = unequal(spec, record)
    if spec.replica != CONFIRMING or record.step != 3 or found is record:
        return found
    return dataclasses.replace(found, digests=found.digests | {"weights": "1" * 32})


def drifting_reference(spec: RunSpec, record: StepRecord) -> StepRecord:
    """The reference equals its control, and its repeat does not."""
    if spec.replica == CONFIRMING and not spec.config["graph"] and not record.step:
        return dataclasses.replace(record, digests=record.digests | {"grads": "2" * 32})
    return unequal(spec, record)


def verdict_of(case_id: str = FAILING) -> Verdict:
    found = RunFolder.open(Path("r")).load_verdict(case_id)
    assert found is not None
    return found


def replicas(engine: FakeEngine) -> int:
    """How many repeats were made."""
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
    verdict = verdict_of()
    found = verdict.confirmation
    assert (verdict.outcome, verdict.what, replicas(engine)) == ("failed", "diverged", 2)
    assert found is not None
    assert (found.outcome, found.reference_repeats, found.candidate_repeats) == (
        outcome, reference, candidate,
    )  # fmt: skip
    assert (found.difference == verdict.difference) == (outcome == "came_again")
    assert (found.difference is None) == (outcome == "did_not_come_again")
    case = next(c for c in RunFolder.open(Path("r")).cases if c.id == FAILING)
    assert found.runs == {side: spec.key for side, spec in confirming_runs(case).items()}
    assert not inspect(Path("r")).damage
    assert inspect(Path("r")).num_runs == 8 + 2


def test_nothing_is_repeated_without_a_difference_of_bits(engine: FakeEngine) -> None:
    """Not for cases that pass, nor for one that nobody wants confirmed."""
    assert main([*RUN]) == ExitCode.PASSED
    engine.spoil = unequal
    assert main(["run", "small.yaml", "--out", "r2", "--no-history"]) == ExitCode.FAILED
    assert replicas(engine) == 0
    assert verdict_of().confirmation is None


@pytest.mark.parametrize("what", ["crashed", "nondeterministic_reference"])
def test_other_ends_are_not_confirmed(engine: FakeEngine, what: What) -> None:
    """A candidate that did not end is explained by its end, a reference that drifts is itself."""
    engine.spoil = unequal
    if what == "crashed":
        engine.ends = {"attn": what}
    else:
        engine.spoil = lambda spec, record: (
            dataclasses.replace(record, digests=record.digests | {"weights": "0" * 32})
            if spec.replica == 1 else unequal(spec, record)
        )  # fmt: skip
    main([*RUN])
    assert verdict_of().what == what
    assert verdict_of().confirmation is None
    assert replicas(engine) == 0


@pytest.mark.parametrize("expect", ["bitwise", "{rtol: 1.0e-5, atol: 0.0}"])
def test_a_tolerance_is_not_confirmed(tmp_path: Path, expect: str) -> None:
    """Bits that differ by design would come again in every right program."""
    path = tmp_path / "s.yaml"
    text = SCENARIO.replace("expect: bitwise", f"expect: {expect}")
    path.write_text(text.replace("timeout_s: 60", "timeout_s: 60, confirm: true"))
    cases = expand(load_scenario(path), "cpu")
    assert {case.confirm for case in cases} == {expect == "bitwise"}


def test_cases_share_the_repeat_of_their_reference(engine: FakeEngine) -> None:
    """Two candidates of one reference fail: three repeats, not four."""
    engine.spoil = lambda spec, record: (
        dataclasses.replace(record, digests=record.digests | {"weights": "0" * 32})
        if spec.config["graph"] and spec.world_size == 2 else record
    )  # fmt: skip
    assert main([*RUN]) == ExitCode.FAILED
    assert replicas(engine) == 3
    ids = (FAILING, "dp2-full_iteration")
    assert {getattr(verdict_of(i).confirmation, "outcome", "") for i in ids} == {"came_again"}


def test_a_repeat_that_does_not_end_confirms_nothing(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evidence names its end; the case stays failed, and --resume makes nothing again."""
    engine.spoil = unequal
    started = engine.start

    def start(spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        engine.ends = {"attn": "crashed"} if spec.replica == CONFIRMING else {}
        started(spec, folder, attempt=attempt)

    engine.start = start  # type: ignore[method-assign]
    assert main([*RUN]) == ExitCode.FAILED
    found = verdict_of().confirmation
    assert found is not None
    assert (found.outcome, found.what, found.candidate_repeats) == ("not_made", "crashed", None)
    made = len(engine.made)
    assert main(["run", "--resume", "r", "--no-history"]) == ExitCode.FAILED
    assert (len(engine.made), verdict_of().confirmation) == (made, found)


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_an_interrupted_confirmation_is_resumed(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], side: str
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
    assert stored.outcome == "failed"
    assert getattr(stored.confirmation, "outcome", "") == "not_made"
    found = inspect(Path("r"))
    assert not found.damage
    engine.on_start = lambda spec: None
    before = {path: path.read_bytes() for path in Path("r").glob("*/*/*.json*")}
    left = {s.key for s in _repeats() if not Path("r/runs", s.key, OUTCOME_FILE).exists()}
    code, plan = run_json(capsys, "run", "--resume", "r", "--dry-run")
    assert (code, {run["key"] for run in plan["runs"]} & {s.key for s in _repeats()}) == (0, left)
    engine.made.clear()
    assert main(["run", "--resume", "r", "--no-history"]) == ExitCode.FAILED
    assert set(engine.made) == {run["key"] for run in plan["runs"]}
    done = verdict_of()
    assert getattr(done.confirmation, "outcome", "") == "came_again"
    assert dataclasses.replace(done, confirmation=stored.confirmation) == stored
    for path, content in before.items():
        if path.parent.name in left:
            path = Path("r/runs", f"{path.parent.name}.attempt0", path.name)
        assert path.read_bytes() == content or path.parent.name == FAILING, path


def _repeats() -> list[RunSpec]:
    case = next(c for c in RunFolder.open(Path("r")).cases if c.id == FAILING)
    return list(confirming_runs(case).values())


def test_a_repeat_that_is_gone_is_damage(engine: FakeEngine) -> None:
    """What a confirmation was made from is among the files that are checked."""
    engine.spoil = only(0)
    main([*RUN])
    folder, verdict = RunFolder.open(Path("r")), verdict_of()
    assert verdict.confirmation is not None
    assert inspect(Path("r")).damage == ()
    folder.set_aside(verdict.confirmation.runs["candidate"])
    assert any(verdict.confirmation.runs["candidate"] in d for d in inspect(Path("r")).damage)


def test_a_timed_run_is_not_disturbed_by_a_confirmation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    """A repeat starts while no timed run is under way, and no timed run beside a repeat."""
    busy = BusyEngine()
    monkeypatch.setattr(launch, "LocalEngine", busy)
    # Cases of one rank fail and are confirmed while those of two are being timed.
    busy.spoil = lambda spec, record: (
        dataclasses.replace(record, digests=record.digests | {"weights": "0" * 32})
        if spec.config["graph"] and spec.world_size == 1 else record
    )  # fmt: skip
    beside: list[tuple[RunSpec, list[RunSpec]]] = []
    busy.on_start = lambda spec: beside.append((spec, [busy.specs[o.key] for o in busy.ended]))
    (tmp_path / "timed.yaml").write_text(TIMED_SCENARIO)
    code = main(["run", "timed.yaml", "--out", "r", "--no-history", *CONFIRM])
    assert code == ExitCode.FAILED
    assert replicas(busy) == 3
    for spec, others in beside:
        together = [spec, *others]
        assert len(together) == 1 or not any(map(is_timed, together))


def test_every_output_shows_it(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Terminal, page, summary, JUnit, JSON, `show`, history and a merged folder."""
    engine.spoil = only(0)
    main([*RUN])
    found = verdict_of().confirmation
    assert found is not None
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
    code, _ = run_json(capsys, "merge", "r", "--out", "merged")
    assert code == ExitCode.FAILED
    merged = RunFolder.open(Path("merged")).load_verdict(FAILING)
    assert merged == verdict_of()
    assert not inspect(Path("merged")).damage


def test_a_rerun_of_the_case_confirms_it_as_well(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The case's own file says that it wants it."""
    engine.spoil = unequal
    main([*RUN])
    answer: Any
    code, answer = run_json(capsys, "rerun", f"r/cases/{FAILING}", "--out", "again")
    (verdict,) = answer["verdicts"]
    assert (code, verdict["confirmation"]["outcome"]) == (ExitCode.FAILED, "came_again")


def test_a_bisection_confirms_none_of_its_questions(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of a search are its own; a confirmation that was cut short is none of them."""
    engine.spoil = unequal
    engine.on_start = lambda spec: None if spec.replica != CONFIRMING else _interrupt()
    assert main([*RUN]) == ExitCode.INTERRUPTED
    engine.made.clear()
    engine.on_start = lambda spec: None
    code, _ = run_json(capsys, "bisect", FAILING, "r", "--out", "b", "--until", "causes")
    assert code == ExitCode.FAILED
    assert engine.made
    assert replicas(engine) == 0


def _interrupt() -> None:
    raise KeyboardInterrupt
