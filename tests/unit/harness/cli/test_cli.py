"""Contracts of harness.cli and harness.runner.launch, with an engine that writes records itself."""

import dataclasses
import shlex
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness import machine
from harness.cli import main
from harness.machine import Gpu
from harness.records import Verdict, What
from harness.runner import launch
from harness.runner.run import execution
from harness.store import RunFolder
from tests.support.fake_engine import SCENARIO, Capsys, FakeEngine, Patch, run_json, unequal


def test_a_matrix_that_agrees_passes(engine: FakeEngine, capsys: Capsys) -> None:
    """Exit 0, a verdict for each case, each run made once, the report's path is the last line."""
    assert main(["run", "small.yaml"]) == 0
    out = capsys.readouterr().out
    assert "4 passed in" in out
    assert out.strip().splitlines()[-1].startswith("report: ")
    assert len(engine.made) == len(set(engine.made)) == 8
    assert engine.closed == 1
    (folder,) = Path("out").glob("*/")
    assert folder.name.startswith("small-2")
    assert (folder / "scenario.yaml").read_text() == SCENARIO
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip().endswith("/report/index.html")
    for _ in range(2):  # in the same second, even
        assert main(["run", "small.yaml", "-k", "dp1-attn"]) == 0
    assert len(list(Path("out").glob("*/"))) == 3


@pytest.mark.parametrize(
    ("ends", "args", "code", "outcomes"),
    [
        ({"attn": "hang"}, (), 1, ["failed", "passed"] * 2),
        ({"attn": "oom", "full_iteration": "killed"}, (), 1, ["failed"] * 4),
        ({"": "crashed"}, (), 6, ["error"] * 4),
        ({"": "crashed", "attn": "hang"}, (), 6, ["error"] * 4),
        ({}, ("--slots", "1"), 0, ["passed"] * 2 + ["skipped"] * 2),
        ({}, ("--slots", "1", "-k", "dp2"), 5, ["skipped"] * 2),
        ({}, ("-k", "dp1 and not attn"), 0, ["passed"]),
        ({}, ("--device", "cuda"), 6, None),  # no run on the CPU in its place
        ({}, ("-k", "nothing"), 5, None),
    ],
)  # fmt: skip
def test_every_end_has_its_exit_code(
    ends: dict[str, What], args: tuple[str, ...], code: int, outcomes: list[str] | None,
    engine: FakeEngine, monkeypatch: Patch, capsys: Capsys,
) -> None:  # fmt: skip
    """A candidate that dies fails (1), a reference that dies leaves none (6), as git reads it."""
    here = dataclasses.replace(machine.describe(), gpus=())
    monkeypatch.setattr(machine, "describe", lambda: here)
    engine.ends = ends
    if outcomes is None:
        assert main(["run", "small.yaml", *args, "--out", "none"]) == code
        assert (engine.made, Path("none").exists()) == ([], False)
        return
    found, answer = run_json(capsys, "run", "small.yaml", *args)
    assert (found, [verdict["outcome"] for verdict in answer["verdicts"]]) == (code, outcomes)
    if "skipped" in outcomes:
        assert answer["verdicts"][-1]["message"] == "needs 2 rank slots, 1 are stated (--slots)"
    in_git = {0: 0, 1: 1, 5: 125, 6: 125}[code]
    assert main(["run", "small.yaml", *args, "--bisect-exit"]) == in_git


def test_a_difference_fails_and_is_named(engine: FakeEngine, capsys: Capsys) -> None:
    """Exit 1, the verdicts of the other cases stand, the first difference is said."""
    engine.spoil = unequal
    code, answer = run_json(capsys, "run", "small.yaml", "--out", "r")
    assert code == answer["exit_code"] == 1
    outcomes = {v["case_id"]: v["outcome"] for v in answer["verdicts"]}
    assert outcomes == {
        "dp1-attn": "failed", "dp1-full_iteration": "passed",
        "dp2-attn": "failed", "dp2-full_iteration": "passed",
    }  # fmt: skip
    assert main(["show", "dp2-attn", "r"]) == 0
    said = capsys.readouterr().out
    assert "step 2, rank 1" in said
    assert "weights w" in said


def test_a_missing_verdict_is_not_a_pass(
    engine: FakeEngine, monkeypatch: Patch, capsys: Capsys
) -> None:
    """Exit code 6 if some cases have none, even if all others passed; -x counts them, too."""

    def short(*args: Any, **options: Any) -> Generator[None, None, tuple[Verdict, ...]]:
        return (yield from execution(*args, **options))[1:]

    with monkeypatch.context() as patch:
        patch.setattr(launch, "execution", short)
        assert main(["run", "small.yaml"]) == 6
    engine.spoil = unequal
    assert main(["run", "small.yaml", "-x"]) == 1
    assert "without a verdict" in capsys.readouterr().out


def test_dry_run_runs_nothing(engine: FakeEngine, capsys: Capsys) -> None:
    """The plan is said, nothing is made and no folder is left."""
    code, plan = run_json(capsys, "run", "small.yaml", "--dry-run", "--jobs", "1", "--slots", "3")
    assert (code, plan["slots"], plan["jobs"], len(plan["runs"])) == (0, 3, 1, 8)
    assert not engine.made
    assert not Path("out").exists()
    assert main(["run", "small.yaml", "--dry-run"]) == 0
    assert "4 cases, 8 runs on" in capsys.readouterr().out


def test_set_and_axis_reach_the_runs(engine: FakeEngine, capsys: Capsys) -> None:
    """Options replace what the file says, and the manifest keeps the command line."""
    args = ["run", "small.yaml", "--out", "r", "--set", "seed=9", "--axis", "parallel=[{dp: 4}]",
            "--set", "launch.timeout_s=7"]  # fmt: skip
    assert run_json(capsys, *args)[0] == 0
    folder = RunFolder.open(Path("r"))
    assert [case.id for case in folder.cases] == ["dp4-attn", "dp4-full_iteration"]
    assert folder.cases[0].candidate.config["seed"] == 9
    assert folder.cases[0].candidate.timeout_s == 7.0
    assert folder.manifest["command"] == ["harness", *args, "--json"]


def test_gpus_are_slots_and_may_be_shared(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """The engine is given the GPU of each slot; a resumed run shares them without being asked."""
    gpus = tuple(Gpu(id=f"GPU-{i}", name="G", memory_bytes=80 << 30) for i in range(2))
    here = dataclasses.replace(machine.describe(), gpus=gpus, versions={"torch": "2.13.0+cu130"})
    monkeypatch.setattr(machine, "describe", lambda: here)
    large = ("run", "small.yaml", "--device", "cuda", "--axis", "parallel=[{dp: 2}, {dp: 4}]")
    code, answer = run_json(capsys, *large)
    assert (code, engine.options["devices"]) == (0, ("GPU-0", "GPU-1"))
    assert {v["message"] for v in answer["verdicts"] if v["outcome"] == "skipped"} == {
        "needs GPUs for 4 ranks, this machine has them for 2"
    }
    code, answer = run_json(capsys, *large, "--ranks-per-gpu", "2", "--out", "r")
    assert (code, {v["outcome"] for v in answer["verdicts"]}) == (0, {"passed"})
    assert engine.options["devices"] == ("GPU-0", "GPU-1") * 2
    shutil.rmtree("r/runs")
    assert run_json(capsys, "run", "--resume", "r")[0] == 0
    assert engine.options["devices"] == ("GPU-0", "GPU-1") * 2


def test_rerun_needs_the_case_folder_alone(
    engine: FakeEngine, capsys: Capsys, tmp_path: Path
) -> None:
    """A case folder that was moved away runs again, with the same specification."""
    engine.spoil = unequal
    assert main(["run", "small.yaml", "--out", "r"]) == 1
    case = RunFolder.open(Path("r")).cases[2]
    moved = tmp_path / "moved"
    Path("r/cases/dp2-attn").rename(moved)
    capsys.readouterr()
    code, answer = run_json(capsys, "rerun", str(moved), "--out", "again")
    assert (code, [v["case_id"] for v in answer["verdicts"]]) == (1, ["dp2-attn"])
    assert RunFolder.open(Path("again")).cases[0] == case


def test_the_newest_run_is_none_that_a_search_made(engine: FakeEngine, capsys: Capsys) -> None:
    """After a bisection an id still means the run that it was asked of; a wrong id is refused."""
    engine.spoil = unequal
    assert main(["run", "small.yaml", "--out", "out/r"]) == 1
    assert run_json(capsys, "bisect", "dp2-attn", "--until", "place")[0] == 1
    assert len(list(Path("out").glob("*/manifest.json"))) == 2
    assert run_json(capsys, "show", "dp2-attn")[1]["folder"].endswith("/out/r/cases/dp2-attn")
    assert main(["show", "dp9"]) == 4
    assert "dp1-attn" in capsys.readouterr().err
    Path("out/r/cases/dp1-attn/verdict.json").write_text("{")
    assert run_json(capsys, "show", "dp1-attn")[1]["verdict"] is None


def test_a_red_run_says_how_to_find_the_cause(engine: FakeEngine, capsys: Capsys) -> None:
    """The command for the first case that failed, which works as it is; none of a green run."""
    assert main(["run", "small.yaml", "--out", "green"]) == 0
    assert "harness bisect" not in capsys.readouterr().out
    engine.spoil = unequal
    assert main(["run", "small.yaml", "--out", "a red run"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("find the cause: "))
    command = shlex.split(line.removeprefix("find the cause: "))
    assert command == ["harness", "bisect", str(Path("a red run/cases/dp1-attn").absolute())]
    assert main([*command[1:], "--until", "place"]) == 1
    engine.ends = {"attn": "crashed"}  # of a tolerance there are no bits to follow
    text = Path("small.yaml").read_text().replace("expect: bitwise", "expect: {rtol: 1e-9}")
    Path("near.yaml").write_text(text)
    capsys.readouterr()
    assert main(["run", "near.yaml"]) == 1
    assert "harness bisect" not in capsys.readouterr().out


def test_a_verdict_of_a_check_that_was_wrong_is_kept_until_a_rerun(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """The records say otherwise by now: resume and check keep the failure, rerun judges anew."""
    assert main(["run", "small.yaml", "--out", "r"]) == 0
    with RunFolder.open(Path("r")) as folder:
        passed = folder.load_verdict("dp2-attn")
        assert passed is not None
        wrong = dataclasses.replace(passed, outcome="failed", what="diverged", message="said so")
        case = next(each for each in folder.cases if each.id == "dp2-attn")
        folder.save_verdict(wrong, case)
    made = len(engine.made)
    capsys.readouterr()
    for command in (("run", "--resume", "r"), ("check", "r")):
        code, answer = run_json(capsys, *command)
        (kept,) = (v for v in answer["verdicts"] if v["case_id"] == "dp2-attn")
        assert (code, Verdict.from_json(kept)) == (1, wrong)
    assert len(engine.made) == made
    code, answer = run_json(capsys, "rerun", "r/cases/dp2-attn", "--out", "anew")
    assert (code, answer["verdicts"][0]["outcome"]) == (0, "passed")


def test_a_stored_pass_whose_records_changed_is_not_taken(engine: FakeEngine) -> None:
    """--resume answers anew from the files that there are."""
    assert main(["run", "small.yaml", "--out", "r"]) == 0
    made = len(engine.made)
    (records,) = Path("r/runs").glob("w1-attn-r0-*/rank0.jsonl")
    records.write_text(records.read_text() + "{}\n")
    assert main(["run", "--resume", "r"]) == 1
    assert len(engine.made) == made


def test_list_says_cases_or_how_many_and_checks_every_file(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """Of several files the numbers, with -k their cases; `--check` says every bad file."""
    assert main(["list", "small.yaml", "-k", "dp1"]) == 0
    assert capsys.readouterr().out.split() == [
        "small.yaml:", "2", "cases", "dp1-attn", "dp1-full_iteration",
    ]  # fmt: skip
    Path("more").mkdir()
    Path("more/a.yaml").write_text("nme: x\n")
    Path("more/b.yml").write_text(SCENARIO + "exclude: [{graph: [attn], parallel: {dp: 2}}]\n")
    Path("more/c.yaml").write_text(
        SCENARIO + "exclude: [{graph: [attn]}, {graph: [full_iteration]}]"
    )
    assert main(["list", "--check", "more"]) == 5
    out, err = capsys.readouterr()
    assert out == "more/b.yml: 3 cases\n"
    assert [line.split(":")[0] for line in err.splitlines()] == ["more/a.yaml", "more/c.yaml"]
    for args in ([], ["--count"]):
        assert main(["list", *args, "small.yaml", "more/b.yml"]) == 0
        *rows, total = capsys.readouterr().out.splitlines()
        assert [row.split() for row in rows] == [["4", "small.yaml"], ["3", "more/b.yml"]]
        assert total.startswith("7 cases in 2 files")
    assert main(["list", "small.yaml", "more/b.yml", "-k", "dp2"]) == 0
    said = capsys.readouterr().out.split()
    assert [name for name in said if name.startswith("dp")] == [
        "dp2-attn", "dp2-full_iteration", "dp2-full_iteration",
    ]  # fmt: skip
    Path("none").mkdir()
    Path("none.yaml").write_text(SCENARIO + "exclude: [{parallel: {dp: 3}}]\n")
    codes = [main(["list", *args.split()]) for args in (
        "--check more/a.yaml more/b.yml", "more", "--check none", "small.yaml -k zzz",
        "--count none.yaml",
    )]  # fmt: skip
    assert codes == [4, 4, 5, 5, 4]
    assert run_json(capsys, "list", "--count", "small.yaml") == (0, {"small.yaml": 4})
    assert run_json(capsys, "list", "small.yaml")[1]["small.yaml"][0]["id"] == "dp1-attn"
    checked = run_json(capsys, "list", "--check", "small.yaml")
    assert checked == (0, [{"file": "small.yaml", "num_cases": 4, "error": "", "exit_code": 0}])
