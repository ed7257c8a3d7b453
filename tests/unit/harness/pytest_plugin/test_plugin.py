"""Scenario files under pytest: what is collected, what cases are to pytest, what is said."""

import json
import os
import signal
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.engine.machine import default_slots, describe_machine
from harness.history.ledger import History
from harness.pytest_plugin import session
from harness.records import RunOutcome
from harness.repeats import in_turn
from harness.runner import launch
from harness.runner.launch import Request, prepare
from harness.runner.run import View
from harness.scenario.matrix import expand_marked as expand_all
from harness.scenario.schema import Scenario
from harness.store import RunFolder
from tests.support.fake_engine import Patch, PlantingEngine

pytest_plugins = ["pytester"]

SCENARIO: dict[str, Any] = {
    "name": "pretend", "why": "A matrix for an engine that pretends.", "tier": "nightly",
    "base": {"steps": 2, "microbatches": 1, "parallel": {"dp": 1}},
    "axes": {
        "plant": ["none", {"fault": "ulp", "step": 1, "rank": "last"}],
        "stress": ["none", ["jitter"], ["poison"]],
    },
    "compare": {"axis": "stress", "reference": "none", "expect": "bitwise"},
    "checks": {"loss": {}, "state": {}},
    "launch": {"device": "cpu", "timeout_s": 30},
}  # fmt: skip
FAULT = "ulp_s1_rlast"
CASES = [
    f"{plant}-stress_{stressor}"
    for plant in ("unplanted", FAULT)
    for stressor in ("jitter", "poison")
]

KEPT = Path("kept")
PLUGIN = ("-p", "harness.pytest_plugin.plugin", "-p", "no:cov", "-p", "no:hypothesispytest")

Run = Callable[..., pytest.RunResult]


def scenario(**changes: Any) -> str:
    return json.dumps(SCENARIO | changes)


def planted(fault: dict[str, Any]) -> str:
    """One case, with a fault."""
    axes = {"plant": [fault], "stress": ["none", ["jitter"]]}
    return scenario(axes=axes)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: Patch) -> Run:
    """pytest in this process, on `scenarios/a.yaml`, with an engine that only pretends."""
    monkeypatch.setattr(launch, "make_engine", PlantingEngine)
    monkeypatch.setattr(PlantingEngine, "MADE", [])
    for name in ("CI", "BUILD_NUMBER"):  # pytest cuts its summary to the terminal but not in CI
        monkeypatch.delenv(name, raising=False)
    (pytester.path / "scenarios").mkdir()
    (pytester.path / "scenarios/a.yaml").write_text(scenario())

    def run(*args: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess(
            *PLUGIN, "--harness-out", "kept", "scenarios", *args
        )  # fmt: skip

    return run


def test_each_case_is_an_item_and_collecting_starts_nothing(
    run: Run, pytester: pytest.Pytester
) -> None:
    """Ids are file::case in the order of the matrix; without --harness there is nothing at all."""
    got = run("--harness", "--co", "-q")
    assert got.outlines[:4] == [f"scenarios/a.yaml::{case}" for case in CASES]
    assert not (pytester.path / "kept").exists()
    assert run().ret == pytest.ExitCode.NO_TESTS_COLLECTED
    pytester.makeini("[pytest]\nharness = true\nharness_files = nothing/*.yaml")
    assert run().ret == pytest.ExitCode.NO_TESTS_COLLECTED
    pytester.makeini("[pytest]\nharness = true")
    assert run("--co", "-q").outlines[:4] == got.outlines[:4]


def test_a_divergence_fails_with_the_words_of_the_verdict(
    run: Run, pytester: pytest.Pytester
) -> None:
    """Equal bits pass, others fail; shared runs are made once; folder and JUnit tell the same."""
    got = run("--harness", "--junitxml", "junit.xml")
    got.assert_outcomes(passed=2, failed=2)
    assert len(PlantingEngine.MADE) == len(set(PlantingEngine.MADE)) == 6
    folder = RunFolder.open(pytester.path / "kept")
    assert [case.id for case in folder.cases] == CASES
    verdicts = {verdict.case_id: verdict for verdict in folder.verdicts()}
    message = verdicts[f"{FAULT}-stress_jitter"].message
    text = got.stdout.str()
    assert text.count(f"failed: diverged: {message}") == 2
    assert text.count(" - failed: diverged: w (we") == 2  # of the summary, cut to the terminal
    case = f"kept/cases/{FAULT}-stress_jitter"
    summary = f"*::{FAULT}-stress_poison *"
    got.stdout.fnmatch_lines([f"*harness rerun {case}", "run folder: *", summary])
    assert "Traceback" not in text
    assert "items.py" not in text
    (suite,) = ET.parse(pytester.path / "junit.xml").getroot()
    found = {element.get("name"): element for element in suite.iter("testcase")}
    assert list(found) == CASES
    failure = found[f"{FAULT}-stress_jitter"].find("failure")
    assert failure is not None
    assert failure.get("message") == f"failed: diverged: {message}"
    properties = {p.get("name"): p.get("value") for p in found[CASES[0]].iter("property")}
    assert properties["outcome"] == "passed"


@pytest.mark.parametrize(
    ("args", "outcomes"),
    [
        (("-x",), {"passed": 2, "failed": 1}),
        (("-k", "ulp and poison"), {"failed": 1, "deselected": 3}),
        (("-k", "stress_jitter and not ulp"), {"passed": 1, "deselected": 3}),
        (("-m", "nightly", "--maxfail", "2"), {"passed": 2, "failed": 2}),
        (("-m", "not nightly"), {}),  # the file's cases are never made
        (("--lf",), {"failed": 2}),
        (("--harness-slots", "1", "--strict-markers"), {"passed": 2, "failed": 2}),
    ],
)
def test_selection_is_as_in_pytest(run: Run, args: tuple[str, ...], outcomes: Any) -> None:
    """-x stops, -k finds names and labels, -m tiers, --lf what failed; no case is exit code 5."""
    if "--lf" in args:
        run("--harness")
        Path("kept").rename("earlier")
    got = run("--harness", *args)
    got.assert_outcomes(**outcomes)
    if not outcomes:
        assert got.ret == pytest.ExitCode.NO_TESTS_COLLECTED
        assert not Path("kept").exists()
    else:
        folder = RunFolder.open(Path("kept"))
        number = 2 if "--lf" in args else 4 - outcomes.get("deselected", 0)
        assert len(folder.cases) == number
        told = [f"pretend: {number} of 4 cases were selected by pytest"] if number < 4 else []
        assert folder.manifest["notes"] == told


@pytest.mark.parametrize(
    ("fault", "args", "outcome", "words"),
    [
        ({"fault": "sigkill", "step": 1}, (), "failed", "failed: killed: "),
        ({"fault": "ulp", "step": 1}, (), "failed", "find the cause: harness bisect kept/cases/"),
        ({"fault": "ulp", "step": 1, "legs": ["control"]}, (), "failed",
         "find the cause: harness bisect kept/cases/"),
        ({"fault": "sigkill", "step": 1, "legs": ["reference"]}, (), "failed", "error: "),
        ({"fault": "ulp", "step": 1, "legs": ["control"]}, (), "failed",
         "incomparable: nondeterministic_reference: "),
        ({"fault": "ulp", "step": 1, "legs": ["control"]}, ("--harness-incomparable", "xfail"),
         "xfailed", "incomparable: nondeterministic_reference: "),
        ({"fault": "illegal_access", "step": 1}, ("--harness-slots", "0"), None,
         "--harness-slots: expected an integer >= 1, got '0'"),
    ],
)  # fmt: skip
def test_only_a_pass_is_green(
    run: Run, fault: dict[str, Any], args: tuple[str, ...], outcome: str | None, words: str
) -> None:
    """Errors and comparisons that cannot be made fail, too, or xfail where that is asked for."""
    Path("scenarios/a.yaml").write_text(planted(fault))
    got = run("--harness", "-rA", *args)
    if outcome is None:
        assert got.ret == pytest.ExitCode.USAGE_ERROR
        assert words in got.stderr.str()
    else:
        got.assert_outcomes(**{outcome: 1})
        assert words in got.stdout.str()


def test_a_case_that_cannot_run_is_skipped_with_its_reason(run: Run) -> None:
    """Two ranks on one slot: skipped, and -rs says why."""
    Path("scenarios/a.yaml").write_text(scenario(base={"steps": 2, "parallel": {"dp": 2}}))
    got = run("--harness", "-rs", "--harness-slots", "1")
    got.assert_outcomes(skipped=4)
    got.stdout.fnmatch_lines(["SKIPPED * scenarios/a.yaml:1: needs 2 rank slots, 1 are stated*"])


def test_what_cannot_be_used_is_an_error_in_one_line(run: Run) -> None:
    """A bad file stops collection with its line and key; a used folder fails and stays as it is."""
    Path("scenarios/b.yaml").write_text("name: b\nwhat: 1\n")
    got = run("--harness")
    assert got.ret == pytest.ExitCode.INTERRUPTED
    got.stdout.fnmatch_lines(["scenarios/b.yaml:*: *what*"])
    Path("scenarios/b.yaml").unlink()
    assert run("--harness", "-k", "unplanted").ret == pytest.ExitCode.OK
    before = Path("kept/cases.json").read_bytes()
    again = run("--harness")
    again.assert_outcomes(failed=4)
    again.stdout.fnmatch_lines(["*no verdict: *is a run folder already*"])
    assert Path("kept/cases.json").read_bytes() == before


def test_cases_timed_against_one_reference_take_turns(run: Run) -> None:
    """Timed runs of a reference and its candidates alternate, though pytest asks case by case."""
    checks = {"state": {}, "throughput": {"max_slowdown": 0.5, "repeats": 6}}
    axes = {"stress": ["none", ["jitter"], ["poison"]]}
    base = {"steps": 30, "microbatches": 1, "parallel": {"dp": 1}}
    Path("scenarios/a.yaml").write_text(scenario(base=base, axes=axes, checks=checks))
    run("--harness")
    cases = RunFolder.open(Path("kept")).cases
    timed = [key for key in PlantingEngine.MADE if key.split("-")[-2] not in ("r0", "r1")]
    assert timed == [spec.key for spec in in_turn(cases)]
    assert len(timed) == 6 * 3


@pytest.mark.parametrize("stopped_by", [signal.SIGINT, signal.SIGTERM, "-x"])
def test_what_is_cut_short_ends_its_runs_and_can_be_resumed(
    run: Run, monkeypatch: Patch, stopped_by: signal.Signals | str
) -> None:
    """Exit code 2 for a signal; the engine is closed, the folder free, --resume does the rest."""
    closed: list[bool] = []

    class Stopped(PlantingEngine):
        def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
            if isinstance(stopped_by, signal.Signals) and len(RunFolder.open(KEPT).verdicts()) == 1:
                os.kill(os.getpid(), stopped_by)
            return super().wait(timeout_s)

        def close(self) -> None:
            closed.append(True)
            super().close()

    monkeypatch.setattr(launch, "make_engine", Stopped)
    if stopped_by == "-x":
        got = run("--harness", "-x", "--harness-slots", "1")
        assert got.ret == pytest.ExitCode.TESTS_FAILED
        got.assert_outcomes(passed=2, failed=1)
    else:
        got = run("--harness", "--harness-slots", "1")
        assert got.ret == pytest.ExitCode.INTERRUPTED
        got.stdout.fnmatch_lines(
            ["*interrupted: 1 of 4 cases are done; go on with: harness run --resume *kept*"]
        )
    assert closed == [True]
    monkeypatch.setattr(launch, "make_engine", PlantingEngine)
    prepared = launch.prepare(launch.Request(resume=KEPT))
    done = launch.carry_out(prepared, View(), out=None, exit_first=False, argv=[])
    assert [verdict.outcome for verdict in done.verdicts] == ["passed"] * 2 + ["failed"] * 2
    assert len(set(PlantingEngine.MADE)) == 6
    assert len(PlantingEngine.MADE) == 7  # the one that was under way is made again


def test_files_are_carried_out_together(run: Run, pytester: pytest.Pytester) -> None:
    """One run folder, work that two scenarios share made once; each item has its own verdict, and
    commands for the folder that pytest was started in, whatever a test before it does."""
    Path("scenarios/0_test.py").write_text(
        "import os\n\ndef test_it(tmp_path):\n    os.chdir(tmp_path)\n"
    )
    Path("scenarios/b.yaml").write_text(
        scenario(name="b", launch=SCENARIO["launch"] | {"slots": 9})
    )
    got = run("--harness", "-v", "--harness-history", str(pytester.path / "history.db"))
    got.assert_outcomes(passed=5, failed=4)
    os.chdir(pytester.path)
    assert len(PlantingEngine.MADE) == 6
    history = History.open(Path("history.db"))
    assert len(list(history.entries())) == 1
    folder = RunFolder.open(KEPT)
    expected = [f"{scenario}.{case}" for scenario in ("pretend", "b") for case in CASES]
    assert [case.id for case in folder.cases] == expected
    assert folder.manifest["slots"] == max(9, default_slots(describe_machine()))
    got.stdout.fnmatch_lines([f"scenarios/b.yaml::{CASES[0]} PASSED*", "*rerun kept/cases/b.ulp*"])


def test_scenarios_of_one_file_are_told_apart(run: Run) -> None:
    """Ids have the scenario's name; -m, -k and verdicts are those of separate files."""
    texts = [
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in each.items())
        for each in (SCENARIO, SCENARIO | {"name": "b", "tier": "pr"})
    ]
    Path("scenarios/a.yaml").write_text("---\n".join(texts))
    got = run("--harness", "--co", "-q", "-m", "pr")
    assert got.outlines[:4] == [f"scenarios/a.yaml::b::{case}" for case in CASES]
    assert len([line for line in got.outlines if "::" in line]) == 4
    run("--harness", "-m", "pr").assert_outcomes(passed=2, failed=2)
    assert [case.id for case in RunFolder.open(KEPT).cases] == CASES


def test_scenarios_that_cannot_run_together_have_no_verdict(run: Run) -> None:
    """Two of one name, or with different engines: each case says so, and nothing runs."""
    for other in ({"name": "pretend"}, {"name": "b", "launch": {"engine": "slurm"}}):
        Path("scenarios/b.yaml").write_text(scenario(**other))
        got = run("--harness")
        got.assert_outcomes(failed=8)
        got.stdout.fnmatch_lines(["*no verdict: *: expected *"])
    assert not KEPT.exists()


SEEDS = {"seed": [1, 2], "stress": ["none", ["jitter"], ["poison"]]}


@pytest.mark.parametrize(
    ("option", "expression", "made", "collected"),
    [
        ("-m", "smoke", ["one"], ["one"]),
        ("-m", "not smoke", ["three", "two"], ["three", "two"]),
        ("-m", "not (smoke or pr)", ["three"], ["three"]),
        ("-m", "weekly", [], []),
        # Somebody's conftest.py may give cases a marker: for pytest to say.
        ("-m", "slow or pr", ["one", "three", "two"], ["two"]),
        ("-m", "smoke or", None, None),
        ("-k", "RACES or seed=2", ["one", "three", "two"], ["one", "two"]),
        ("-k", "sub or smoke", ["one", "three", "two"], ["one", "three"]),
        ("-k", "smoke or", None, None),
    ],
)  # fmt: skip
def test_files_that_m_leaves_out_are_never_expanded(
    run: Run, monkeypatch: Patch, option: str, expression: str,
    made: list[str] | None, collected: list[str] | None,
) -> None:  # fmt: skip
    """What is collected is what pytest's documentation says; pytest refuses what it refuses."""
    Path("scenarios/a.yaml").unlink()
    Path("scenarios/sub").mkdir()
    races = {"microbatches": [1, 2], "stress": ["none", ["races"]]}
    three = {"stress": SEEDS["stress"]}
    for name, axes, tier in (
        ("one", SEEDS, "smoke"),
        ("two", races, "pr"),
        ("sub/three", three, ""),
    ):
        text = scenario(name=Path(name).name, axes=axes, tier=tier).replace('"tier": "", ', "")
        Path(f"scenarios/{name}.yaml").write_text(text)
    expanded = list[str]()

    def expand_marked(held: Scenario, device: Any) -> Any:
        expanded.append(held.name)
        return expand_all(held, device)

    monkeypatch.setattr(session, "expand_marked", expand_marked)
    got = run("--harness", "--co", "-q", option, expression)
    if made is None:
        assert got.ret == pytest.ExitCode.USAGE_ERROR
        got.stderr.fnmatch_lines([f"ERROR: Wrong expression passed to '{option}'*"])
        return
    found = {Path(line.partition("::")[0]).stem for line in got.outlines if "::" in line}
    assert (sorted(expanded), sorted(found)) == (made, collected)
    assert got.ret == (pytest.ExitCode.OK if collected else pytest.ExitCode.NO_TESTS_COLLECTED)


def test_a_pairwise_choice_is_that_of_harness_run(run: Run) -> None:
    """The same cases in the same order; -k selects among them."""
    file = Path("scenarios/a.yaml")
    axes = {"ledger": [True, False], "microbatches": [1, 2], **SEEDS, **SCENARIO["axes"]}
    file.write_text(scenario(axes=axes, select="pairwise"))
    cases = [f"{file}::{c.id}" for c in prepare(Request(paths=(file,), device="cpu")).plan.cases]
    assert 4 < len(cases) < 16
    for words, left in ((), cases), (("-k", "seed1"), [c for c in cases if "seed1" in c]):
        got = run("--harness", "--co", "-q", *words)
        assert [line for line in got.outlines if "::" in line] == left


def test_cases_are_not_shared_out_to_processes(run: Run) -> None:
    """A harness in each would give the same slots twice: refused in one sentence."""
    got = run("--harness", "-n", "2")
    assert got.ret == pytest.ExitCode.USAGE_ERROR
    got.stderr.fnmatch_lines(["ERROR: -n: expected -n 0 with --harness*"])
    assert run("--harness", "--co", "-n", "0").ret == pytest.ExitCode.OK
