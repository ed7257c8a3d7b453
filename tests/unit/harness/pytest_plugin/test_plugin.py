"""Scenario files under pytest: what is collected, what cases are to pytest, what is said."""

import itertools
import json
import os
import signal
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.history import History
from harness.machine import default_slots, describe
from harness.pytest_plugin import collection
from harness.records import RunOutcome
from harness.repeats import in_turn
from harness.runner import launch
from harness.runner.launch import Request, prepare
from harness.runner.run import Silent
from harness.scenario.matrix import expand
from harness.scenario.matrix import expand_marked as expand_all
from harness.scenario.schema import Scenario, load_scenario
from harness.store import RunFolder, num_kept
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
        ({"fault": "sigkill", "step": 1, "legs": ["reference"]}, (), "failed", "error: "),
        ({"fault": "ulp", "step": 1, "legs": ["control"]}, (), "failed",
         "incomparable: nondeterministic_reference: "),
        ({"fault": "ulp", "step": 1, "legs": ["control"]}, ("--harness-incomparable", "xfail"),
         "xfailed", "incomparable: nondeterministic_reference: "),
        ({"fault": "illegal_access", "step": 1}, ("--harness-slots", "0"), None, ""),
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
            ["*interrupted: 1 of 4 cases are done; go on with --resume *kept*"]
        )
    assert closed == [True]
    monkeypatch.setattr(launch, "make_engine", PlantingEngine)
    prepared = launch.prepare(launch.Request(resume=KEPT))
    done = launch.carry_out(prepared, Silent(), out=None, exit_first=False, argv=[])
    assert [verdict.outcome for verdict in done.verdicts] == ["passed"] * 2 + ["failed"] * 2
    assert len(set(PlantingEngine.MADE)) == 6
    assert len(PlantingEngine.MADE) == 7  # the one that was under way is made again


def test_files_are_carried_out_together(run: Run) -> None:
    """One run folder, work that two scenarios share made once; each item has its own verdict."""
    Path("scenarios/b.yaml").write_text(
        scenario(name="b", launch=SCENARIO["launch"] | {"slots": 9})
    )
    got = run("--harness", "-v")
    got.assert_outcomes(passed=4, failed=4)
    assert len(PlantingEngine.MADE) == 6
    folder = RunFolder.open(KEPT)
    expected = [f"{scenario}.{case}" for scenario in ("pretend", "b") for case in CASES]
    assert [case.id for case in folder.cases] == expected
    assert folder.manifest["slots"] == max(9, default_slots(describe()))
    got.stdout.fnmatch_lines([f"scenarios/b.yaml::{CASES[0]} PASSED*", "*rerun kept/cases/b.ulp*"])


@pytest.mark.parametrize(
    "other", [{"name": "pretend"}, {"name": "b", "launch": {"engine": "slurm", "timeout_s": 30}}]
)
def test_scenarios_that_cannot_run_together_have_folders_of_their_own(
    run: Run, other: dict[str, Any]
) -> None:
    """Two of one name, or with different engines, in one session: all cases have their verdicts."""
    Path("scenarios/b.yaml").write_text(scenario(**other))
    run("--harness", "--harness-history", "history.db").assert_outcomes(passed=4, failed=4)
    folders = [RunFolder.open(path) for path in sorted(KEPT.iterdir())]
    assert [[case.id for case in folder.cases] for folder in folders] == [CASES, CASES]
    with History.open(Path("history.db")) as history:
        assert len(list(history.entries())) == 2


SEEDS = {"seed": [1, 2], "stress": ["none", ["jitter"], ["poison"]]}
LEDGERS = {"ledger": [True, False], "microbatches": [1, 2], "steps": [2, 3], **SEEDS}
PLANTS = {"plant": ["none", {"fault": "ulp", "step": 1, "rank": "last"}]}
PAIRS = {"axes": {**LEDGERS, **PLANTS}, "select": "pairwise"}


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

    monkeypatch.setattr(collection, "expand_marked", expand_marked)
    got = run("--harness", "--co", "-q", option, expression)
    if made is None:
        assert got.ret == pytest.ExitCode.USAGE_ERROR
        got.stderr.fnmatch_lines([f"ERROR: Wrong expression passed to '{option}'*"])
        return
    found = {Path(line.partition("::")[0]).stem for line in got.outlines if "::" in line}
    assert (sorted(expanded), sorted(found)) == (made, collected)
    assert got.ret == (pytest.ExitCode.OK if collected else pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.mark.parametrize(
    "words", [None, "seed1", "seed=2 and not ledger=false", "microbatches1 or poison"]
)
def test_a_pairwise_choice_is_that_of_harness_run(run: Run, words: str | None) -> None:
    """With -k or without: the same cases in the same order, of those that -k leaves."""
    file = Path("scenarios/a.yaml")
    file.write_text(scenario(**PAIRS))
    cases = prepare(Request(paths=(file,), keyword=words, device="cpu")).plan.cases
    got = run("--harness", "--co", "-q", *(("-k", words) if words else ()))
    assert [line for line in got.outlines if "::" in line] == [f"{file}::{c.id}" for c in cases]
    assert got.outlines[-1].startswith(f"{len(cases)}/64 tests collected ({64 - len(cases)} desel")


def test_a_case_asked_for_by_its_name_is_never_chosen_away(
    run: Run, pytester: pytest.Pytester
) -> None:
    """Cases beyond the pairwise choice run when they are named, and again with --lf."""
    file = Path("scenarios/a.yaml")
    file.write_text(scenario(**PAIRS))
    chosen = {case.id for case in prepare(Request(paths=(file,), device="cpu")).plan.cases}
    beyond = [c.id for c in expand(load_scenario(file), "cpu") if c.id not in chosen]
    assert len(beyond) > 10
    nodes = [f"{file}::{case}" for case in beyond]
    got = pytester.runpytest_inprocess(*PLUGIN, "--harness", "--co", "-q", *nodes)
    assert [line for line in got.outlines if "::" in line] == nodes
    both = pytester.runpytest_inprocess(*PLUGIN, "--harness", "--co", "-q", str(file), nodes[0])
    assert nodes[0] in both.outlines
    assert len(both.outlines) < len(beyond)
    failed = [node for node in nodes if "ulp" in node]
    pytester.runpytest_inprocess(*PLUGIN, "--harness", "--harness-out", "first", *failed)
    again = run("--harness", "--co", "-q", "--lf")
    assert [line for line in again.outlines if "::" in line] == failed
    first = [line for line in run("--harness", "--co", "-q", "--ff").outlines if "::" in line]
    assert first[: len(failed)] == failed
    assert len(first) < 64


ROOT = Path(__file__).parents[4]
CONFTEST = f"""
import os, signal
from pathlib import Path
import pytest
from harness.runner import launch
from tests.support.fake_engine import PlantingEngine

launch.make_engine = PlantingEngine

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    with open(f"of{{os.getpid()}}", "a") as file:
        file.write(f"{{item.name}}\\n")
    if item.name == "{CASES[2]}" and not Path("ended").exists():
        ended = Path("kept/runs").glob("*/outcome.json")
        Path("ended").write_text(" ".join(path.parent.name for path in ended))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: Patch) -> pytest.Pytester:
    """Four cases in two files and three tests, whose third case kills its worker, once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    for name, plant in zip("ab", SCENARIO["axes"]["plant"], strict=True):
        text = scenario(name=name, axes=SCENARIO["axes"] | {"plant": [plant]})
        (pytester.path / f"{name}.yaml").write_text(text)
    pytester.makepyfile("def test_0(): pass\ndef test_1(): pass\ndef test_2(): pass\n")
    return pytester


@pytest.mark.parametrize("dist", ["load", "loadfile"])
def test_one_worker_has_all_cases_and_another_goes_on_if_it_dies(
    session: pytest.Pytester, dist: str
) -> None:
    """Every case gets its verdict, in one run folder, and no run that had ended is made again."""
    got = session.runpytest_subprocess(
        *PLUGIN, "--harness", "--harness-out", "kept", "-n", "2", "--dist", dist, "a.yaml",
        "b.yaml", ".",
    )  # fmt: skip
    got.assert_outcomes(passed=5, failed=3)
    got.stdout.fnmatch_lines([f"*crashed while running 'b.yaml::{CASES[2]}'*"])
    got.stdout.fnmatch_lines([f"*repeat it:  harness rerun kept/cases/b.{CASES[2]}"])
    workers = [file.read_text().split() for file in session.path.glob("of*")]
    of_cases = [tuple(name for name in names if name in CASES) for names in workers]
    assert set(filter(None, of_cases)) == {tuple(CASES[:3]), tuple(CASES[2:])}
    assert Counter(itertools.chain(*workers))["test_1"] == 1
    folder = RunFolder.open(session.path / "kept")
    outcomes = [verdict.outcome for verdict in folder.verdicts()]
    assert outcomes == ["failed" if FAULT in case else "passed" for case in CASES]
    ended = (session.path / "ended").read_text().split()
    assert ended
    assert not any(num_kept(folder.run_folder(key)) for key in ended)


def test_a_distribution_that_gives_every_worker_all_cases_is_refused(
    session: pytest.Pytester,
) -> None:
    """One sentence, and nothing runs."""
    got = session.runpytest_subprocess(*PLUGIN, "--harness", "-n", "2", "--dist", "each", ".")
    assert got.ret == pytest.ExitCode.USAGE_ERROR
    got.stderr.fnmatch_lines(["ERROR: --dist each: expected another with --harness: *"])
