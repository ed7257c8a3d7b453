"""Contracts of `harness bisect`, with an engine that writes records itself."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import provenance
from harness.bisect.experiments import AskedQuestion, Asker
from harness.bisect.render import asked, known_of
from harness.cli import main
from harness.records import RunSpec, StepRecord
from harness.store import RunFolder
from tests.support.fake_engine import (
    SCENARIO,
    Capsys,
    Cli,
    FakeEngine,
    Patch,
    Spoil,
    failed_run,
    other_bits,
    run_json,
)
from tests.support.git_history import git, harnesses, make_history

PLACE = ("--until", "place", "--no-element")
FOUND = ("bisect", "dp2-attn", "r", "--out", "b")
Bisect = Callable[..., tuple[int, Any]]


@pytest.fixture
def bisect(engine: FakeEngine, capsys: Capsys) -> Bisect:
    """Exit code and JSON answer of a search in the failed run `r`, or in a scenario."""
    failed_run(engine)
    return lambda *args: run_json(capsys, *args)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def kept() -> Any:
    return json.loads(Path("b/bisect.json").read_text())


def test_a_failing_case_is_led_to_its_place(
    bisect: Bisect, engine: FakeEngine, capsys: Capsys
) -> None:
    """The case's own runs are not made again; nothing is made for a case that passed."""
    code, found = bisect(*FOUND, *PLACE)
    assert code == found["exit_code"] == 1
    place = found["place"]
    assert (place["step"], place["phase"], place["tensor"]) == (2, "optimizer", "w")
    assert (place["rank"], place["ranks"], kept()["place"]) == (1, [1], place)
    assert "dp2-attn" in Path("b/bisect.md").read_text()
    cases = {case.id: case for case in RunFolder.open(Path("r")).cases}
    assert dict(known_of(cases["dp2-attn"], Path("b")))["where"] == "step 2, optimizer, rank 1"
    assert not known_of(cases["dp2-full_iteration"], Path("b"))
    assert (engine.made, engine.closed) == ([], 2)
    assert main(["bisect", "dp2-full_iteration", "r"]) == 0
    assert "nothing to bisect" in capsys.readouterr().out
    assert (engine.made, Path("out").exists()) == ([], False)


def test_the_same_command_goes_on_and_asks_nothing_twice(
    bisect: Bisect, engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """What was found is kept, also by a search that is stopped."""
    command = [*FOUND, "--until", "causes"]
    engine.on_start = lambda *_: interrupt() if len(engine.made) == 3 else None
    assert main(command) == 2
    assert (kept()["place"]["tensor"], kept()["stopped"]) == ("w", "interrupted")
    engine.on_start = lambda *_: None
    code, found = bisect(*command)
    assert (code, found["stopped"]) == (1, "")
    assert [cause["changes"] for cause in found["causes"]["causes"]] == [["graph: attn"]]
    assert found["num_runs"] == len(set(engine.made)) >= len(engine.made) - 1
    questions = found["questions"]
    made = len(engine.made)
    capsys.readouterr()
    assert main(command) == 1
    out = capsys.readouterr().out.partition("failed diverged  dp2-attn")[0]
    told = re.findall(r"^ *(\d+)\. (.*\?.*)$", out, re.M)
    assert [int(number) for number, _ in told] == list(range(1, len(questions) + 1))
    for question, (_, line) in zip(questions, told, strict=True):
        assert line.startswith(f"{asked(AskedQuestion.from_json(question))} {question['answer']}")
    assert len(engine.made) == made
    monkeypatch.setattr(Asker, "ask", interrupt)
    assert main(command) == 2
    assert kept()["stopped"] == "interrupted"
    for name in ("outcome", "what", "message", "place", "causes"):
        assert kept()[name] == found[name]


def test_the_least_case_is_left_as_a_scenario_that_fails_alone(bisect: Bisect) -> None:
    """It is written once, where it was asked for, and fails by itself."""
    for _ in range(2):
        code, found = bisect(*FOUND, "--repro", "alone")
        assert (code, found["least_case"]["path"]) == (1, "alone/repro_small_dp2_attn.yaml")
        assert [path.name for path in Path("alone").iterdir()] == ["repro_small_dp2_attn.yaml"]
    assert main(["run", "alone/repro_small_dp2_attn.yaml", "--out", "again", "--no-history"]) == 1


def test_other_environments_are_said_first(
    engine: FakeEngine, bisect: Bisect, capsys: Capsys, monkeypatch: Patch
) -> None:
    """Of today's variables and code, and of an earlier search, whose answers are left."""
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    command = ["bisect", "dp2-attn", "r", *PLACE]
    first = bisect(*command)[1]
    (told,) = first["environment"]
    assert told.startswith("the case and further runs ran in other environments: variable NCCL_")
    monkeypatch.delenv("NCCL_ALGO")
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"torch": "2.12"})
    monkeypatch.setattr(provenance, "describe", lambda: "2" * 40)
    code, second = bisect(*command)
    assert (code, second["folder"]) == (1, f"{first['folder']}-2")
    assert second["environment"][0].startswith("answers of an earlier search, in out/bisect-small")
    assert any(f"further runs are made as '{'2' * 12}'" in each for each in second["environment"])
    assert main([*command, "--out", "out/bisect-small.dp2-attn"]) == 4
    assert ": name another" in capsys.readouterr().err


def test_causes_are_sought_among_runs_of_one_environment(
    engine: FakeEngine, bisect: Bisect, monkeypatch: Patch
) -> None:
    """Where it was recorded is told of the case's own runs, and why it fails of new ones."""
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    engine.environment = {"fingerprint": {"torch": "x", "NCCL_ALGO": "Tree"}}
    code, found = bisect(*FOUND)
    assert (code, found["place"]["tensor"]) == (1, "w")
    assert [cause["changes"] for cause in found["causes"]["causes"]] == [["graph: attn"]]
    assert found["least_case"]["path"]


@pytest.mark.parametrize("fault", ["device", "rank"])
def test_hardware_says_what_the_failure_follows(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch, fault: str
) -> None:
    """A device or a rank, from runs up to the bad step on other cores; asked again it runs none."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})

    def spoil(spec: RunSpec, record: StepRecord) -> StepRecord:
        on = (spec.placed or ("0", "1"))[record.rank] if fault == "device" else str(record.rank)
        is_here = spec.config["graph"] == ["attn"] and record.step >= 2
        return other_bits(record) if is_here and on == "1" else record

    failed_run(engine, spoil)
    seen = list[RunSpec]()
    engine.on_start = seen.append
    code, found = run_json(capsys, *FOUND, "--hardware")
    traced = found["hardware"]
    best = traced["suspects"][0]
    named = {"device": "1", "rank": None} if fault == "device" else {"device": "", "rank": 1}
    assert (code, traced["follows"]) == (1, fault)
    assert {name: best[name] for name in named} == named
    assert {trial["placed"] for trial in map(_tupled, traced["trials"])} >= {("0", "1"), ("1", "0")}
    assert {spec.config["steps"] for spec in seen} == {3}
    assert found["causes"] is None
    made = len(engine.made)
    assert run_json(capsys, *FOUND, "--hardware")[1]["hardware"] == traced
    assert len(engine.made) == made > 0


def _tupled(trial: dict[str, Any]) -> dict[str, Any]:
    return trial | {"placed": tuple(trial["placed"])}


def test_hardware_is_asked_of_this_machine_alone(bisect: Bisect, capsys: Capsys) -> None:
    """Not with commits, nor of runs that Slurm made on nodes."""
    path = Path("r/manifest.json")
    path.write_text(path.read_text().replace('"slurm": null', '"slurm": {"nodes": 2}'))
    for options in (["--commits", "a..b"], []):
        capsys.readouterr()
        assert main([*FOUND, "--hardware", *options]) == 4
        assert capsys.readouterr().err.count("\n") == 1


def test_cases_of_a_scenario_are_run_first(bisect: Bisect, engine: FakeEngine) -> None:
    """Also two candidates held to each other; one that passes says so."""
    attn, whole = "dp2 and attn", "dp2 and full_iteration"
    code, found = bisect("bisect", "small.yaml", "-k", attn, *PLACE)
    assert (code, found["num_runs"]) == (1, 3)
    assert found["folder"] == str(Path("out/bisect-small.dp2-attn").absolute())
    code, found = bisect("bisect", "small.yaml", "-k", whole, *PLACE)
    assert (code, found["outcome"], found["place"]) == (0, "passed", None)
    engine.made.clear()
    code, found = bisect("bisect", "small.yaml", "-k", attn, "--against", whole, *PLACE)
    assert (code, found["case_id"]) == (1, "dp2-attn-against-dp2-full_iteration")
    assert (found["place"]["step"], found["place"]["rank"]) == (2, 1)
    assert not any("eager" in key for key in engine.made)


def test_a_reference_that_differs_from_its_control_is_itself_located(
    bisect: Bisect, engine: FakeEngine
) -> None:
    """The candidate is not blamed."""

    def spoil(spec: RunSpec, record: StepRecord) -> StepRecord:
        is_there = spec.replica == 1 and record.step == 3 and not record.rank
        return other_bits(record, "grads", "1") if is_there else record

    engine.spoil = spoil
    code, found = bisect("bisect", "small.yaml", "-k", "dp2 and attn", *PLACE)
    assert (code, found["outcome"]) == (6, "incomparable")
    assert (found["place"]["step"], found["place"]["quantity"]) == (3, "grads")
    assert "not to blame" in found["place"]["evidence"][0]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["small.yaml"], "expected -k EXPR that selects one case, got 4"),
        (["small.yaml", "r"], "expected no RUN with the scenario"),
        (["dp2-attn", "r", "-k", "x"], "--device and --set with a scenario"),
        (["dp3-attn", "r"], "expected a case folder or id"),
        (["dp2-attn", "r", "--out", "r"], "expected a search of dp2-attn or nothing"),
        (["missing.yaml"], "missing.yaml"),
        (["dp2-attn", "r", "--against", "x"], "--against, --device and --set with a"),
        (["small.yaml", "-k", "dp2 and attn", "--against", "dp1"], "expected --against EXPR that"),
        (["small.yaml", "-k", "dp2 and attn", "--against", "dp1 and attn"], "the same data"),
        (["dp2-attn", "r", "--every-run"], "--commits"),
    ],
)
@pytest.mark.usefixtures("bisect")
def test_a_request_that_cannot_be_is_one_line(cli: Cli, args: list[str], expected: str) -> None:
    """Exit 4: what was expected and what was got."""
    assert expected in cli.refused("bisect", *args)


@pytest.mark.parametrize("between", [False, True])
def test_a_search_that_has_no_answer_yet_ends_like_any_other(
    bisect: Bisect, engine: FakeEngine, capsys: Capsys, between: bool
) -> None:
    """Ctrl-C in its first question: why it ended, and how to go on."""
    two = "axes: {parallel: [{tp: 1}, {tp: 2}], graph: [eager, [attn]]}"
    Path("two.yaml").write_text(SCENARIO.replace(SCENARIO.splitlines()[3], two))
    against = ["-k", "tp2", "--against", "tp1"] if between else ["-k", "tp2"]
    engine.on_start = interrupt
    assert main(["bisect", "two.yaml", *against, "--out", "b"]) == 2
    assert "go on with: harness bisect two.yaml -k tp2" in capsys.readouterr().err
    names = ("stopped", "outcome", "what", "num_runs")
    assert [kept()[name] for name in names] == ["interrupted", "error", "not_run", 0]


# --- faults that seldom fire ------------------------------------------------------------------


def fires_in(runs: range | tuple[int, ...], engine: FakeEngine) -> Spoil:
    """A gradient of rank 1 that is wrong from step 2 on, in these of the graphed runs."""
    fired: dict[str, bool] = {}

    def spoil(spec: RunSpec, record: StepRecord) -> StepRecord:
        if spec.config["graph"] != ["attn"] or spec.world_size == 1:
            return record
        fires = fired.setdefault(engine.made[-1], len(fired) in runs)
        is_wrong = fires and record.rank and record.step >= 2
        return other_bits(record, "grads") if is_wrong else record

    return spoil


def searched_in(engine: FakeEngine, capsys: Capsys, runs: Any, *more: str) -> Any:
    failed_run(engine, fires_in(runs, engine))
    return run_json(capsys, *FOUND, "--until", "place", *more)[1]


def test_a_look_that_a_fault_stays_away_from_is_repeated(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """Until it comes; that it may not come is said, and so is that looking may keep it away."""
    found = searched_in(engine, capsys, range(0, 20, 4), "--no-element")
    place = found["place"]
    assert (place["step"], place["tensor"], place["ranks"]) == (2, "w", [1])
    assert "it comes now and then: the same run passes, too" in place["evidence"]
    assert found["num_runs"] == len(engine.made) > 3
    looks = [q for q in found["questions"] if q["words"].startswith("which call")]
    assert [q["answer"].startswith("step 2") for q in looks] == [False] * (len(looks) - 1) + [True]


# --- commits ----------------------------------------------------------------------------------


@pytest.fixture
def history(engine: FakeEngine, monkeypatch: Patch, tmp_path: Path) -> list[str]:
    """The working folder is a repository of 17 commits of harnesses that answer at once."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("ASKED_OF_HISTORY", str(tmp_path / "asked.log"))
    commits = make_history(tmp_path, harnesses(16, 11, broken=(3, 12, 14)))
    failed_run(engine)
    return commits


def test_the_first_bad_commit_in_log2_of_all(history: list[str], capsys: Capsys) -> None:
    """Each with the slots that were given; the same command asks nothing again."""
    room = ("--slots", "4", "--jobs", "2")
    command = [*FOUND, "--until", "environment", "--commits", f"{history[0]}..{history[-1]}",
               "--every-run", *room]  # fmt: skip
    code, found = run_json(capsys, *command)
    commits = found["commits"]
    assert (code, commits["first"]["hash"]) == (1, history[11])
    assert commits["first"]["subject"] == "Change 11"
    num_skipped = len(commits["skipped"])
    assert commits["num_runs"] <= 4 + 2 + num_skipped
    assert found["num_runs"] == 3 * commits["num_runs"]
    lines = Path("asked.log").read_text().splitlines()
    assert len(lines) == commits["num_runs"] - num_skipped
    assert all(line.endswith("--json --no-history --slots 4 --jobs 2") for line in lines)
    assert git(Path.cwd(), "worktree", "list").count("\n") == 0
    assert git(Path.cwd(), "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert main(command) == 1
    assert f"first bad commit: {history[11][:10]} Change 11" in capsys.readouterr().out
    assert Path("asked.log").read_text().splitlines() == lines
