"""Contracts of `harness bisect`, with an engine that writes records itself."""

import dataclasses
import json
from pathlib import Path

import pytest

from harness import provenance
from harness.bisect.experiments import Asker
from harness.cli import main
from harness.records import RunSpec, StepRecord
from tests.support.fake_engine import (
    SCENARIO,
    Capsys,
    FakeEngine,
    Patch,
    failed_run,
    run_json,
    unequal,
)


def test_a_failing_case_is_led_to_its_place(engine: FakeEngine, capsys: Capsys) -> None:
    """Step, phase, tensor and rank; the case's own runs are taken over, not made again."""
    failed_run(engine)
    code, found = run_json(
        capsys, "bisect", "dp2-attn", "r", "--out", "b", "--until", "place", "--no-element"
    )
    assert code == found["exit_code"] == 1
    place = found["place"]
    assert (place["step"], place["phase"], place["tensor"]) == (2, "optimizer", "w")
    assert (place["rank"], place["ranks"]) == (1, [1])
    assert engine.made == []
    assert json.loads(Path("b/bisect.json").read_text())["place"] == place
    assert "dp2-attn" in Path("b/bisect.md").read_text()
    assert engine.closed == 2


def test_the_same_command_goes_on_and_asks_nothing_twice(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """A budget that ends is exit code 6, and what was found is kept; then it goes on."""
    failed_run(engine)
    command = ["bisect", "dp2-attn", "r", "--out", "b", "--until", "causes"]
    code, found = run_json(capsys, *command, "--budget-runs", "2")
    assert (code, found["exit_code"]) == (6, 6)
    assert "budget of 2 runs" in found["stopped"]
    assert found["place"]["tensor"] == "w"
    first = set(engine.made)
    assert len(first) <= 2
    code, found = run_json(capsys, *command)
    assert (code, found["stopped"]) == (1, "")
    assert [cause["changes"] for cause in found["causes"]["causes"]] == [["graph: attn"]]
    assert found["num_runs"] == len(engine.made) == len(set(engine.made))
    made = len(engine.made)
    assert run_json(capsys, *command)[0] == 1
    assert len(engine.made) == made


def test_the_least_case_is_left_as_a_scenario_that_fails_alone(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """It is where it was asked for, runs and fails by itself, and is not written twice."""
    failed_run(engine)
    command = ["bisect", "dp2-attn", "r", "--out", "b", "--repro", "alone"]
    for _ in range(2):
        code, found = run_json(capsys, *command)
        assert code == 1
        assert found["least_case"]["path"] == "alone/repro_small_dp2_attn.yaml"
        assert [path.name for path in Path("alone").iterdir()] == ["repro_small_dp2_attn.yaml"]
    assert main(["run", "alone/repro_small_dp2_attn.yaml", "--out", "again", "--no-history"]) == 1


def test_a_night_that_passed_is_compared_first(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """What has changed since is the first line, and does not keep causes from being searched."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert main(["run", "small.yaml", "--out", "good", "--no-history"]) == 0
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    failed_run(engine)
    code, found = run_json(
        capsys, "bisect", "dp2-attn", "r", "--out", "b", "--passed", "good", "--until", "causes",
        "--no-element",
    )  # fmt: skip
    assert code == 1
    (told,) = found["environment"]
    assert told.startswith("good and r ran in other environments: NCCL_ALGO Ring became Tree")
    assert found["causes"]["causes"]


def test_a_cell_of_a_scenario_is_run_first(engine: FakeEngine, capsys: Capsys) -> None:
    """A case that was never run is run as a question of the search; one that passes says so."""
    engine.spoil = unequal
    options = ["--until", "place", "--no-element"]
    code, found = run_json(capsys, "bisect", "small.yaml", "-k", "dp2 and attn", *options)
    assert code == 1
    assert (found["num_runs"], found["folder"]) == (
        3,
        str(Path("out/bisect-small.dp2-attn").absolute()),
    )
    code, found = run_json(capsys, "bisect", "small.yaml", "-k", "dp2 and full_iteration", *options)
    assert (code, found["outcome"], found["place"]) == (0, "passed", None)


def test_two_cells_of_one_layout_are_held_to_each_other(engine: FakeEngine, capsys: Capsys) -> None:
    """The candidate of one is the reference of the other: what differs is found between them."""
    engine.spoil = unequal
    code, found = run_json(
        capsys, "bisect", "small.yaml", "-k", "dp2 and attn", "--against", "dp2 and full_iteration",
        "--until", "place", "--no-element",
    )  # fmt: skip
    assert (code, found["case_id"]) == (1, "dp2-attn-against-dp2-full_iteration")
    assert (found["place"]["step"], found["place"]["rank"]) == (2, 1)
    assert not any("eager" in key for key in engine.made)


def test_a_case_that_passed_has_nothing_to_bisect(engine: FakeEngine, capsys: Capsys) -> None:
    """Exit 0, one line, no folder, no run."""
    failed_run(engine)
    assert main(["bisect", "dp2-full_iteration", "r"]) == 0
    assert "nothing to bisect" in capsys.readouterr().out
    assert engine.made == []
    assert not Path("out").exists()


def test_a_reference_that_differs_from_its_control_is_itself_located(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """The candidate is not blamed: the place is where the two runs of the reference part."""

    def spoil(spec: RunSpec, record: StepRecord) -> StepRecord:
        if spec.replica != 1 or record.step != 3 or record.rank:
            return record
        return dataclasses.replace(record, digests=record.digests | {"grads": "1" * 32})

    engine.spoil = spoil
    code, found = run_json(
        capsys, "bisect", "small.yaml", "-k", "dp2 and attn", "--until", "place", "--no-element"
    )
    assert (code, found["outcome"]) == (6, "incomparable")
    assert (found["place"]["step"], found["place"]["quantity"]) == (3, "grads")
    assert "not to blame" in found["place"]["evidence"][0]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["small.yaml"], "expected -k EXPR that selects one case, got 4"),
        (["small.yaml", "r"], "expected no RUN beside the scenario"),
        (["dp2-attn", "r", "-k", "x"], "--device and --set with a scenario"),
        (["dp3-attn", "r"], "expected a case folder or id"),
        (["dp2-attn", "r", "--out", "r"], "expected a search of dp2-attn or nothing"),
        (["missing.yaml"], "missing.yaml"),
        (["dp2-attn", "r", "--against", "x"], "--against, --device and --set with a"),
        (["small.yaml", "-k", "dp2 and attn", "--against", "dp1"], "expected --against EXPR that"),
        (["small.yaml", "-k", "dp2 and attn", "--against", "dp1 and attn"], "the same data"),
    ],
)
def test_a_request_that_cannot_be_is_one_line(
    engine: FakeEngine, capsys: Capsys, args: list[str], expected: str
) -> None:
    """Exit 4: what was expected and what was got."""
    failed_run(engine)
    capsys.readouterr()
    assert main(["bisect", *args]) == 4
    err = capsys.readouterr().err
    assert expected in err
    assert len(err.splitlines()) == 1


def test_an_interrupted_search_keeps_what_it_found(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """Exit 2; the place is on disk, and the message has the command that goes on."""
    failed_run(engine)

    def interrupt(spec: RunSpec) -> None:
        raise KeyboardInterrupt

    engine.on_start = interrupt
    capsys.readouterr()
    command = ["bisect", "dp2-attn", "r", "--out", "b", "--no-element", "--until", "causes"]
    assert main(command) == 2
    assert "go on with: harness bisect dp2-attn r" in capsys.readouterr().err
    kept = json.loads(Path("b/bisect.json").read_text())
    assert (kept["stopped"], kept["place"]["tensor"]) == ("interrupted", "w")
    engine.on_start = lambda spec: None
    assert main(command) == 1


def test_records_of_other_code_are_said_first(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """Further runs are made by today's code: where that is another, it may have been mended."""
    failed_run(engine)
    monkeypatch.setattr(provenance, "describe", lambda: "2" * 40)
    command = ["bisect", "dp2-attn", "r", "--no-element", "--until", "place", "--out", "b"]
    code, found = run_json(capsys, *command)
    assert code == 1
    assert f"further runs are made as '{'2' * 12}'" in found["environment"][-1]


@pytest.mark.parametrize("between", [False, True])
def test_a_search_that_has_no_answer_yet_ends_like_any_other(
    engine: FakeEngine, capsys: Capsys, between: bool
) -> None:
    """A budget or Ctrl-C in its first question: what is asked, why it ended, how to go on."""
    two = "axes: {parallel: [{tp: 1}, {tp: 2}], graph: [eager, [attn]]}"
    Path("two.yaml").write_text(SCENARIO.replace(SCENARIO.splitlines()[3], two))
    against = ["-k", "tp2", "--against", "tp1"] if between else ["-k", "tp2"]
    command = ["bisect", "two.yaml", *against, "--out", "b", "--budget-runs", "2"]
    code, found = run_json(capsys, *command)
    assert (code, found["exit_code"], found["outcome"]) == (6, 6, "error")
    assert (found["what"], found["num_runs"]) == ("not_run", 0)
    assert found["stopped"].startswith("the budget of 2 runs: 0 spent, the next question")
    assert main(command) == 6
    out = capsys.readouterr().out
    assert "not finished: the budget of 2 runs" in out
    assert "again: harness bisect two.yaml -k tp2" in out

    def interrupt(spec: RunSpec) -> None:
        raise KeyboardInterrupt

    engine.on_start = interrupt
    assert main(command[:-2]) == 2
    assert "go on with: harness bisect two.yaml -k tp2" in capsys.readouterr().err
    assert json.loads(Path("b/bisect.json").read_text())["stopped"] == "interrupted"


def test_a_sitting_that_ends_early_forgets_nothing(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """Ctrl-C before it has come to where the last one was: what that knew is still there."""
    failed_run(engine)
    command = ["bisect", "dp2-attn", "r", "--out", "b", "--until", "causes", "--no-element"]
    code, whole = run_json(capsys, *command)
    assert code == 1

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Asker, "ask", interrupt)
    assert main(command) == 2
    kept = json.loads(Path("b/bisect.json").read_text())
    for name in ("outcome", "what", "message", "place", "causes"):
        assert kept[name] == whole[name]
    assert kept["stopped"] == "interrupted"


def test_answers_of_another_environment_are_left_alone(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """Another version of a package: a folder of its own, and what differs is said first."""
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"torch": "2.11"})
    failed_run(engine)
    command = ["bisect", "dp2-attn", "r", "--no-element", "--until", "place"]
    first = run_json(capsys, *command)[1]
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"torch": "2.12"})
    code, second = run_json(capsys, *command)
    assert (code, first["environment"]) == (1, [])
    assert second["environment"] == [
        "answers of an earlier search, in out/bisect-small.dp2-attn, are left alone: "
        "package torch 2.11 became 2.12",
        "the case and further runs ran in other environments: torch 2.11 became 2.12",
    ]
    assert second["folder"] == f"{first['folder']}-2"
    assert main([*command, "--out", "out/bisect-small.dp2-attn"]) == 4
    assert "but package torch 2.11 became 2.12: name another" in capsys.readouterr().err
