"""Contracts of harness.cli and harness.runner.launch, with an engine that writes records itself."""

import dataclasses
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import click
import pytest

from harness.cli import COMMANDS, for_git, main
from harness.cli import run as report_commands
from harness.engine import machine
from harness.engine.machine import Gpu
from harness.errors import Infrastructure
from harness.records import ExitCode, RunSpec, Verdict, What
from harness.runner import launch
from harness.store import RunFolder
from tests.support.fake_engine import (
    SCENARIO,
    Capsys,
    FakeEngine,
    Patch,
    failed_run,
    other_bits,
    run_json,
    unequal,
)


def test_a_matrix_that_agrees_passes(engine: FakeEngine, capsys: Capsys) -> None:
    """Exit 0, a verdict for each case, each run made once, the report's path is the last line."""
    assert main(["run", "small.yaml"]) == 0
    out = capsys.readouterr().out
    assert "4 passed in" in out
    assert out.strip().splitlines()[-1].startswith("report: ")
    assert len(engine.made) == len(set(engine.made)) == 8
    assert engine.closed == 1
    (folder,) = Path("out").glob("small*/")
    assert folder.name.startswith("small-2")
    assert (folder / "scenario.yaml").read_text() == SCENARIO
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip().endswith("/report/index.html")
    for _ in range(2):  # in the same second, even
        assert main(["run", "small.yaml", "-k", "dp1-attn"]) == 0
    assert len(list(Path("out").glob("small*/"))) == 3


@pytest.mark.parametrize("answer", [0, 1])
def test_the_page_is_opened_where_a_browser_is(
    answer: int, engine: FakeEngine, monkeypatch: Patch, capsys: Capsys
) -> None:
    """By run and report; without a browser the page is named, and the exit code stays."""
    opened: list[str] = []

    def opening(url: str) -> int:
        opened.append(url)
        return answer

    monkeypatch.setattr(click, "launch", opening)
    engine.ends = {"attn": "hang"}
    for command, code in (("run small.yaml --out r --open", 1), ("report r --open", 0)):
        assert main(command.split()) == code
        assert capsys.readouterr().err.count("no browser could open") == answer
    assert opened == [str(Path("r/report/index.html").absolute())] * 2
    assert main(["report", "r"]) == 0
    assert len(opened) == 2


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
    here = dataclasses.replace(machine.describe_machine(), gpus=())
    monkeypatch.setattr(machine, "describe_machine", lambda: here)
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


def test_a_difference_fails_is_named_and_led_to_its_cause(
    engine: FakeEngine, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run`, `show`, the command that it prints, and `rerun` of a case folder that was moved.
    A reference that differs from its control has a cause, too, after that of what failed."""
    engine.spoil = lambda spec, record: other_bits(record) if spec.replica else record
    assert main(["run", "small.yaml", "-k", "dp2", "--out", "varies"]) == 6
    assert "\nfind the cause: harness bisect " in capsys.readouterr().out
    engine.spoil = unequal
    code, answer = run_json(capsys, "run", "small.yaml", "--out", "out/a red run")
    assert code == answer["exit_code"] == 1
    assert {v["case_id"]: v["outcome"] for v in answer["verdicts"]} == {
        "dp1-attn": "failed", "dp1-full_iteration": "passed",
        "dp2-attn": "failed", "dp2-full_iteration": "passed",
    }  # fmt: skip
    assert main(["show", "dp2-attn", "out/a red run"]) == 0
    said = capsys.readouterr().out
    assert "step 2, rank 1" in said
    assert "weights w" in said
    for run in ("out/a red run", "a red run"):
        monkeypatch.chdir(tmp_path / "out" if run == "a red run" else tmp_path)
        assert main(["show", run]) == 4
        assert "as cases/dp1-attn, cases/dp1-full_iteration, " in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--resume", "out/a red run"]) == 1
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("find the cause: ")
    )
    command = shlex.split(line.removeprefix("find the cause: "))
    assert command == ["harness", "bisect", str(Path("out/a red run/cases/dp1-attn").absolute())]
    assert main([*command[1:], "--until", "place"]) == 1
    # The newest run is none that a search made.
    assert len(list(Path("out").glob("*/manifest.json"))) == 2
    folder = run_json(capsys, "show", "dp2-attn")[1]["folder"]
    assert folder.endswith("/out/a red run/cases/dp2-attn")
    case = RunFolder.open(Path("out/a red run")).cases[2]
    Path(folder).rename(tmp_path / "moved")
    code, answer = run_json(capsys, "rerun", str(tmp_path / "moved"), "--out", "again")
    assert (code, [v["case_id"] for v in answer["verdicts"]]) == (1, ["dp2-attn"])
    assert RunFolder.open(Path("again")).cases[0] == case
    Path("out/a red run/cases/dp1-attn/verdict.json").write_text("{")
    assert run_json(capsys, "show", "dp1-attn", "out/a red run")[1]["verdict"] is None
    engine.ends = {"attn": "crashed"}  # of a tolerance there are no bits to follow
    near = SCENARIO.replace("expect: bitwise", "expect: {rtol: 1e-9}")
    Path("near.yaml").write_text(near)
    assert main(["run", "near.yaml"]) == 1
    assert "harness bisect" not in capsys.readouterr().out


def test_dry_run_runs_nothing(engine: FakeEngine, capsys: Capsys) -> None:
    """The plan is said, nothing is made and no folder is left."""
    code, plan = run_json(capsys, "run", "small.yaml", "--dry-run", "--jobs", "1", "--slots", "3")
    assert (code, plan["slots"], plan["jobs"], len(plan["runs"])) == (0, 3, 1, 8)
    assert not engine.made
    assert not Path("out").exists()
    assert main(["run", "small.yaml", "--dry-run"]) == 0
    assert "4 cases, 8 runs on" in capsys.readouterr().out


def test_gpus_are_slots_and_may_be_shared(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """The engine is given the GPU of each slot; a resumed run shares them without being asked."""
    gpus = tuple(Gpu(id=f"GPU-{i}", name="G", memory_bytes=80 << 30) for i in range(2))
    here = dataclasses.replace(
        machine.describe_machine(), gpus=gpus, versions={"torch": "2.13.0+cu130"}
    )
    monkeypatch.setattr(machine, "describe_machine", lambda: here)
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


def test_a_case_without_a_verdict_is_not_a_pass(engine: FakeEngine, monkeypatch: Patch) -> None:
    """However it came about: all verdicts that there are passed, and one is missing."""
    carry_out = launch.carry_out

    def lose_one(*args: Any, **kwargs: Any) -> launch.Carried:
        done = carry_out(*args, **kwargs)
        return dataclasses.replace(done, verdicts=done.verdicts[1:])

    monkeypatch.setattr(launch, "carry_out", lose_one)
    assert main(["run", "small.yaml"]) == ExitCode.NO_VERDICT


def test_stored_answers_are_kept_and_damaged_ones_are_not_taken(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """Resume and check keep a failure that a rerun takes back; a pass needs its records."""
    assert main(["run", "small.yaml", "--out", "r"]) == 0
    with RunFolder.open(Path("r")) as folder:
        passed = folder.load_verdict("dp2-attn")
        assert passed is not None
        wrong = dataclasses.replace(passed, outcome="failed", what="diverged", message="said so")
        folder.save_verdict(wrong, next(each for each in folder.cases if each.id == "dp2-attn"))
    made = len(engine.made)
    for command in (("run", "--resume", "r"), ("check", "r")):
        code, answer = run_json(capsys, *command)
        (kept,) = (v for v in answer["verdicts"] if v["case_id"] == "dp2-attn")
        assert (code, Verdict.from_json(kept)) == (1, wrong)
    assert len(engine.made) == made
    assert run_json(capsys, "rerun", "r/cases/dp2-attn", "--out", "anew")[0] == 0
    made = len(engine.made)
    (records,) = Path("r/runs").glob("w1-attn-r0-*/rank0.jsonl")
    records.write_text(records.read_text() + "{}\n")
    code, answer = run_json(capsys, "run", "--resume", "r")
    whats = {v["case_id"]: v["what"] for v in answer["verdicts"]}
    assert (code, whats["dp1-attn"], whats["dp2-attn"]) == (1, "record_after_end", "diverged")
    assert len(engine.made) == made


def test_list_says_cases_or_how_many_and_checks_every_file(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """Of several files the numbers, with -k their cases; `--check` says every bad file."""
    for name, text in {
        "more/a.yaml": "nme: x\n",
        "more/b.yml": SCENARIO + "exclude: [{graph: [attn], parallel: {dp: 2}}]\n",
        "more/c.yaml": SCENARIO + "exclude: [{graph: [attn]}, {graph: [full_iteration]}]",
        "none.yaml": SCENARIO + "exclude: [{parallel: {dp: 3}}]\n",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("none").mkdir()

    def said(args: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["list", *args.split()]) == code
        return capsys.readouterr().out

    assert said("small.yaml -k dp1").split()[-2:] == ["dp1-attn", "dp1-full_iteration"]
    assert said("--check more", 4) == "more/b.yml: 3 cases\n"
    for args in ("small.yaml more/b.yml", "--count small.yaml more/b.yml"):
        told = "small.yaml: 4 cases\nmore/b.yml: 3 cases\n7 cases in 2 scenarios\n"
        assert said(args) == told
    assert said("small.yaml more/b.yml -k dp2").count("dp2-full_iteration") == 2
    for args, code in (
        ("--check more/a.yaml more/b.yml", 4), ("more", 4), ("--check none", 5),
        ("--check more/b.yml more/c.yaml", 5),
        ("small.yaml -k zzz", 5), ("--count none.yaml", 4),
    ):  # fmt: skip
        said(args, code)
    assert run_json(capsys, "list", "--count", "small.yaml") == (0, {"small.yaml": 4})
    assert run_json(capsys, "list", "small.yaml")[1]["small.yaml"][0]["id"] == "dp1-attn"
    checked = run_json(capsys, "list", "--check", "small.yaml")
    assert checked == (0, [{"file": "small.yaml", "num_cases": 4, "error": "", "exit_code": 0}])
    code, checks = run_json(capsys, "list", "--checks")
    assert (code, checks["loss"]["options"]) == (0, {})
    assert checks["graphs"]["options"]["min_replays"]["expected"] == "an integer >= 0"


# --- what the command line does when it is misused, interrupted, or finds a bug ---


MISUSES = [
    ("run --resume r -k x", "expected no -k"),
    ("run --resume r --set seed=1", "expected no --set"),
    ("run --resume r --device cpu", "expected no --device"),
    ("run --resume nowhere", "is not a run folder"),
    ("run other.yaml --resume r", "expected no SCENARIO"),
    ("run", "expected a SCENARIO, --tier or --resume RUN"),
    ("run small.yaml --out r", "is a run folder already"),
    ("run small.yaml --out small.yaml", "expected a folder or nothing"),
    ("run small.yaml --slots 0", "--slots"),
    ("run small.yaml --jobs x", "--jobs"),
    ("run small.yaml --ranks-per-gpu 0", "--ranks-per-gpu"),
    ("run small.yaml --ranks-per-gpu 2", "--ranks-per-gpu 2: expected a run on GPUs"),
    ("run small.yaml --device tpu", "--device"),
    ("run small.yaml --slurm nodes=2", "--slurm: expected --engine slurm with it"),
    ("run small.yaml --engine slurm --out new", "expected to be started in an allocation"),
    ("list --check small.yaml -k dp1", "list --check: expected no -k"),
    ("list --check small.yaml --tier pr", "list --check: expected no --tier"),
    ("run small.yaml --frobnicate", "--frobnicate"),
    ("run small.yaml --mixed", "expected --resume"),
    ("run small.yaml other.yaml", "other.yaml"),
    ("run small.yaml -k (a", "-k '(a': expected"),
    ("run small.yaml --set seed", "--set 'seed'"),
    (f"run {'x' * 5000}.yaml", "too long"),
    ("frob", "frob"),
    ("--frob", "--frob"),
    ("show", "CASE"),
    ("show dp9 r", "dp1-attn"),
    ("show nowhere/dp1-attn", "nowhere/dp1-attn"),
    ("bisect nowhere/dp1-attn", "nowhere/dp1-attn"),
    ("report nowhere", "nowhere"),
    ("rerun x r", "'x'"),
]


def test_misuse_is_one_line_and_exit_4(
    engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """Every misuse costs one line on stderr and exit 4, never click's 2, and nothing is made."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["run", "small.yaml", "--out", "r", "-k", "dp1-attn"]) == 0
    Path("other.yaml").write_text(SCENARIO.replace("steps: 4", "steps: 5"))
    made = len(engine.made)
    capsys.readouterr()
    for args, said in MISUSES:
        assert main(args.split()) == 4, args
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), said in err) == ("", 1, True), (args, err)
    assert (len(engine.made), Path("new").exists()) == (made, False)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_and_the_version_are_exit_0(command: str, capsys: Capsys) -> None:
    """-h works everywhere and says what the command does; without a command it is misuse."""
    assert main([*command.split(), "-h"]) == 0
    assert f"Usage: harness {command}" in capsys.readouterr().out
    if not command:
        assert (main([]), main(["--version"])) == (4, 0)
        assert re.fullmatch(r"harness \S.*\n", capsys.readouterr().out)


def test_a_bug_in_the_engine_is_exit_3_with_its_traceback_kept(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """Our own mistake is one line too; the traceback lies in the run folder."""

    def broken(spec: RunSpec) -> None:
        raise KeyError("oops")

    engine.on_start = broken
    assert main(["run", "small.yaml", "--out", "r"]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "internal error: KeyError: 'oops'" in err
    assert "Traceback" in Path("r/internal_error.txt").read_text()
    assert engine.closed == 1


def _stopped_in_run(engine: FakeEngine, number: int) -> None:
    """Two cases are judged after four runs; somebody stops the harness in a later one."""

    def stop(spec: RunSpec) -> None:
        if len(engine.made) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    engine.on_start = stop


def test_an_interrupted_run_shows_and_reports_what_is_done(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """SIGTERM while runs are made: exit 2, failures so far, counts, report, how to go on."""
    engine.spoil = unequal
    _stopped_in_run(engine, 5)
    code, answer = run_json(capsys, "run", "small.yaml", "--out", "r")
    assert code == answer["exit_code"] == 2
    assert [v["outcome"] for v in answer["verdicts"]] == ["failed", "passed"]
    assert (answer["num_cases"], list(answer["reports"])) == (4, ["html"])
    assert main(["run", "--resume", "r"]) == 2
    out, err = capsys.readouterr()
    *_, counts, ends, report = out.splitlines()
    assert counts.startswith("1 passed, 1 failed, 2 without a verdict in ")
    assert ends.startswith("interrupted: ")
    assert report.startswith("report: ")
    where = Path("r").absolute()
    told = f"2 of 4 cases are done; go on with: harness run --resume {where}"
    assert err == f"harness: interrupted: {told}\n"
    engine.on_start = lambda spec: None
    assert main(["run", "--resume", "r"]) == 1


@pytest.mark.parametrize(("spoil", "code"), [(unequal, 1), (lambda spec, record: record, 6)])
def test_a_report_that_cannot_be_written_takes_no_verdict_away(
    spoil: Any, code: int, engine: FakeEngine, capsys: Capsys, monkeypatch: Patch
) -> None:
    """A failure ends with 1 all the same, a pass with 6; JSON has the verdicts; so does a merge."""

    def refuse(*_: object) -> None:
        raise Infrastructure("cannot write report: no room")

    monkeypatch.setattr(report_commands, "build_reports", refuse)
    engine.spoil = spoil
    found, answer = run_json(capsys, "run", "small.yaml", "--out", "r")
    assert found == answer["exit_code"] == code
    assert (len(answer["verdicts"]), answer["reports"]) == (4, {})
    found, answer = run_json(capsys, "merge", "r", "--out", "m")
    assert found == answer["exit_code"] == code
    assert (Path("m") / "manifest.json").exists()


def test_a_case_is_shown_by_its_verdict_if_its_own_file_is_damaged(
    engine: FakeEngine, capsys: Capsys
) -> None:
    """The plan says what the case is: as text as in JSON."""
    failed_run(engine)
    place = Path("r/cases/dp2-attn/case.json")
    place.unlink()
    place.write_text("{")
    code, answer = run_json(capsys, "show", "dp2-attn", "r")
    assert (code, answer["verdict"]["outcome"]) == (0, "failed")
    assert main(["show", "dp2-attn", "r"]) == 0
    assert "step 2, rank 1" in capsys.readouterr().out


def test_every_exit_code_has_a_meaning_for_git() -> None:
    """Good and bad are those of a verdict; without one a commit is skipped, or the search stops."""
    found = {code.name: for_git(code, ["run", "--bisect-exit"]) for code in ExitCode}
    assert found == {
        "PASSED": 0, "FAILED": 1, "INTERNAL": 125, "NOTHING_RAN": 125, "NO_VERDICT": 125,
        "INTERRUPTED": 130, "USAGE": 132,
    }  # fmt: skip
    assert [for_git(code, ["run"]) for code in ExitCode] == list(ExitCode)
