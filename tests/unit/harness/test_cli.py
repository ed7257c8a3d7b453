"""Contracts of harness.cli and harness.launch, with an engine that writes records itself."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import cli, launch, machine
from harness.cli import main
from harness.errors import Infrastructure
from harness.machine import Gpu
from harness.records import (
    DIGEST_GROUPS,
    EndRecord,
    FloatBits,
    RankExit,
    RunOutcome,
    RunSpec,
    StartRecord,
    StepRecord,
    What,
    dumps,
)
from harness.run import execute
from harness.store import RunFolder, begin_run, save_outcome

SCENARIO = """\
name: small
why: A sentence with <b>markup</b> and [red]brackets[/red].
base: {steps: 4}
axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [attn], [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 60}
"""


class FakeEngine:
    """Makes runs at once, with equal bits; `spoil` changes records, `ends` outcomes by graph."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.options: dict[str, Any] = {}
        self.ends: dict[str, What] = {}
        self.spoil: Callable[[RunSpec, StepRecord], StepRecord] = lambda spec, record: record
        self.on_start: Callable[[RunSpec], None] = lambda spec: None
        self.ended: list[RunOutcome] = []
        self.closed = 0

    def __call__(self, **options: Any) -> "FakeEngine":
        """Stand in for the class of the engine."""
        self.options = options
        return self

    @property
    def slots(self) -> int:
        return int(self.options["slots"])

    def check(self, spec: RunSpec) -> None:
        assert spec.world_size <= self.slots

    def can_start(self, spec: RunSpec) -> bool:
        return not self.ended

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self.on_start(spec)
        self.made.append(spec.key)
        begin_run(folder, spec)
        for rank in range(spec.world_size):
            lines = [dumps(record) for record in self._records(spec, rank)]
            (folder / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
        what = self.ends.get("+".join(spec.config["graph"]), "")
        outcome = RunOutcome(
            key=spec.key, what=what, message=f"planted {what}" if what else "",
            culprit_rank=0 if what else None, started_unix_s=0.0, wall_s=0.5, attempt=attempt,
            ranks=tuple(RankExit(rank=r, code=1 if what else 0) for r in range(spec.world_size)),
        )  # fmt: skip
        save_outcome(folder, outcome)
        self.ended.append(outcome)

    def _records(self, spec: RunSpec, rank: int) -> list[Any]:
        tensors: dict[str, tuple[str, ...]] = dict.fromkeys(DIGEST_GROUPS, ("w",))
        steps = [
            self.spoil(
                spec,
                StepRecord(
                    step=step, rank=rank, loss=FloatBits.from_bits(0x40000000),
                    microbatch_losses=(FloatBits.from_bits(0x40000000),),
                    grad_norm=FloatBits.from_bits(0x3F000000),
                    digests={group: hashlib.md5(f"{group}{rank}{step}".encode()).hexdigest()
                             for group in DIGEST_GROUPS},
                    nonfinite=dict.fromkeys(DIGEST_GROUPS, ()),
                    step_s=0.01, live_bytes=10, peak_bytes=20,
                ),
            )
            for step in range(spec.config["steps"])
        ]  # fmt: skip
        start = StartRecord(
            schema=1, rank=rank, world_size=spec.world_size, pid=1, device="cpu", tensors=tensors,
            environment={"fingerprint": {"torch": "x"}},
        )  # fmt: skip
        end = EndRecord(rank=rank, steps=len(steps), peak_bytes=20, startup_s=0.1, wall_s=0.5,
                        replays=len(steps) if spec.config["graph"] else 0)  # fmt: skip
        return [start, *steps, end]

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        ended, self.ended = self.ended, []
        return ended

    def cancel(self) -> None:
        self.ended = []

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """A fake in place of the local engine; the working folder is a fresh one."""
    fake = FakeEngine()
    monkeypatch.setattr(launch, "LocalEngine", fake)
    monkeypatch.setattr(
        cli, "_build_reports", lambda folder: {"html": folder / "report" / "index.html"}
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return fake


def unequal(spec: RunSpec, record: StepRecord) -> StepRecord:
    """One weight of the last rank of graphed runs differs from step 2 on."""
    last = record.rank == spec.world_size - 1
    if not (spec.config["graph"] == ["attn"] and last and record.step >= 2):
        return record
    return dataclasses.replace(record, digests=record.digests | {"weights": "0" * 32})


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    """Exit code and JSON answer of one command."""
    capsys.readouterr()
    code = main([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_matrix_that_agrees_passes(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0, a verdict for each case, each run made once, the report's path is the last line."""
    assert main(["run", "small.yaml"]) == 0
    out = capsys.readouterr().out
    assert "4 passed in" in out
    assert out.strip().splitlines()[-1].startswith("report: ")
    assert len(engine.made) == len(set(engine.made)) == 8
    assert engine.closed == 1
    (folder,) = Path("out").iterdir()
    assert folder.name.startswith("small-2")
    assert (folder / "scenario.yaml").read_text() == SCENARIO


def test_a_difference_fails_and_is_named(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({"attn": "hang"}, 1), ({"": "crashed"}, 6), ({"": "crashed", "attn": "hang"}, 6),
        ({"attn": "oom", "full_iteration": "killed"}, 1),
    ],
)  # fmt: skip
def test_ends_become_exit_codes(
    ends: dict[str, What], code: int, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A candidate that dies is a failure (1), a reference that dies leaves no verdict (6)."""
    engine.ends = ends
    assert run_json(capsys, "run", "small.yaml")[0] == code


def test_exit_first_stops_and_does_not_pass(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """With -x the first failure ends it; cases without a verdict are counted as such."""
    engine.spoil = unequal
    assert main(["run", "small.yaml", "-x"]) == 1
    assert "without a verdict" in capsys.readouterr().out


def test_a_missing_verdict_is_not_a_pass(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If some cases have no verdict the exit code is 6, even if all others passed."""
    real = execute
    monkeypatch.setattr(launch, "execute", lambda *a, **k: real(*a, **k)[1:])
    assert main(["run", "small.yaml"]) == 6


def test_dry_run_runs_nothing(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is said, nothing is made and no folder is left."""
    code, plan = run_json(capsys, "run", "small.yaml", "--dry-run", "--jobs", "1", "--slots", "3")
    assert (code, plan["slots"], plan["jobs"], len(plan["runs"])) == (0, 3, 1, 8)
    assert not engine.made
    assert not Path("out").exists()
    assert main(["run", "small.yaml", "--dry-run"]) == 0
    assert "4 cases, 8 runs on" in capsys.readouterr().out


def test_what_does_not_fit_is_skipped_and_all_skipped_is_exit_5(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A skipped case does not spoil a pass, but skipping everything is not one."""
    code, answer = run_json(capsys, "run", "small.yaml", "--slots", "1")
    assert code == 0
    reasons = {v["message"] for v in answer["verdicts"] if v["outcome"] == "skipped"}
    assert reasons == {"needs 2 rank slots, 1 are stated (--slots)"}
    assert run_json(capsys, "run", "small.yaml", "--slots", "1", "-k", "dp2")[0] == 5
    assert main(["run", "small.yaml", "--slots", "1", "-k", "dp2", "--dry-run"]) == 5


def test_k_selects(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the cases that match are planned and run; no match is exit 5."""
    code, answer = run_json(capsys, "run", "small.yaml", "-k", "dp1 and not attn")
    assert (code, [v["case_id"] for v in answer["verdicts"]]) == (0, ["dp1-full_iteration"])
    assert len(engine.made) == 3
    assert main(["run", "small.yaml", "-k", "nothing", "--out", "none"]) == 5
    assert "'nothing' selects none of 4 cases of small" in capsys.readouterr().err
    assert not Path("none").exists()


def test_set_and_axis_reach_the_runs(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options replace what the file says, and the manifest keeps the command line."""
    args = ["run", "small.yaml", "--out", "r", "--set", "seed=9", "--axis", "parallel=[{dp: 4}]",
            "--set", "launch.timeout_s=7"]  # fmt: skip
    assert run_json(capsys, *args)[0] == 0
    folder = RunFolder.open(Path("r"))
    assert [case.id for case in folder.cases] == ["dp4-attn", "dp4-full_iteration"]
    assert folder.cases[0].candidate.config["seed"] == 9
    assert folder.cases[0].candidate.timeout_s == 7.0
    assert folder.manifest["command"] == ["harness", *args, "--json"]


def test_resume_makes_only_what_is_missing(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that are finished are not made again; the verdicts are those of the whole matrix."""
    failing = {"left": 3}

    def stop(spec: RunSpec) -> None:
        if not failing["left"]:
            raise Infrastructure("the engine is gone")
        failing["left"] -= 1

    engine.on_start = stop
    assert main(["run", "small.yaml", "--out", "r"]) == 6
    assert "harness: the engine is gone" in capsys.readouterr().err
    first = list(engine.made)
    failing["left"] = 100
    code, plan = run_json(capsys, "run", "--resume", "r", "--dry-run")
    assert (code, len(plan["runs"])) == (0, 5)
    code, answer = run_json(capsys, "run", "small.yaml", "--resume", "r")
    assert code == 0
    assert len(answer["verdicts"]) == 4
    assert len(engine.made) == len(set(engine.made)) == 8
    assert engine.made[:3] == first
    assert run_json(capsys, "run", "--resume", "r")[0] == 0
    assert len(engine.made) == 8


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--resume", "r", "-k", "x"], "expected no -k"),
        (["--resume", "r", "--set", "seed=1"], "expected no --set"),
        (["--resume", "r", "--device", "cpu"], "expected no --device"),
        (["--resume", "nowhere"], "is not a run folder"),
        (["other.yaml", "--resume", "r"], "which differs"),
        ([], "expected a SCENARIO or --resume RUN"),
        (["small.yaml", "--out", "r"], "is a run folder already"),
        (["small.yaml", "--out", "small.yaml"], "expected a folder or nothing"),
        (["small.yaml", "--slots", "0"], "--slots"),
        (["small.yaml", "--jobs", "x"], "--jobs"),
        (["small.yaml", "--device", "tpu"], "--device"),
        (["small.yaml", "--frobnicate"], "--frobnicate"),
        (["small.yaml", "other.yaml"], "other.yaml"),
        (["small.yaml", "-k", "(a"], "-k '(a': expected"),
        (["small.yaml", "--set", "seed"], "--set 'seed'"),
    ],
)
def test_misuse_is_one_line_and_exit_4(
    args: list[str], said: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every misuse costs one line on stderr and exit 4, and nothing runs."""
    assert main(["run", "small.yaml", "--out", "r", "-k", "dp1-attn"]) == 0
    Path("other.yaml").write_text(SCENARIO.replace("steps: 4", "steps: 5"))
    made = len(engine.made)
    capsys.readouterr()
    assert main(["run", *args]) == 4
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert len(engine.made) == made


@pytest.mark.parametrize("args", [[], ["frob"], ["--frob"], ["show"], ["report", "nowhere"],
                                  ["show", "x"], ["rerun", "x"]])  # fmt: skip
def test_other_commands_misused(args: list[str], engine: FakeEngine) -> None:
    """Usage mistakes end in 4 for every command, never in click's own 2."""
    assert main(args) == 4


def test_help_is_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    """-h works everywhere and says what the command does."""
    for command in ([], ["run"], ["list"], ["report"], ["show"], ["rerun"], ["doctor"]):
        assert main([*command, "-h"]) == 0
        assert "Usage: harness" in capsys.readouterr().out


def test_cuda_without_a_gpu_is_no_verdict(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that asks for GPUs does not pass on the CPU in their place."""
    here = dataclasses.replace(machine.describe(), gpus=())
    monkeypatch.setattr(machine, "describe", lambda: here)
    assert main(["run", "small.yaml", "--device", "cuda"]) == 6
    assert not engine.made


def test_gpus_are_slots(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CUDA there are as many slots as GPUs, and the engine is told which."""
    gpus = tuple(Gpu(id=f"GPU-{i}", name="G", memory_bytes=1) for i in range(2))
    here = dataclasses.replace(machine.describe(), gpus=gpus, versions={"torch": "2.13.0+cu130"})
    monkeypatch.setattr(machine, "describe", lambda: here)
    code, answer = run_json(
        capsys, "run", "small.yaml", "--device", "cuda", "--axis", "parallel=[{dp: 2}, {dp: 4}]"
    )
    assert code == 0
    assert engine.options["devices"] == ("GPU-0", "GPU-1")
    assert {v["message"] for v in answer["verdicts"] if v["outcome"] == "skipped"} == {
        "needs 4 GPUs, this machine has 2"
    }


def test_rerun_needs_the_case_folder_alone(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
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


def test_show_finds_the_newest_run_and_unknown_cases_are_refused(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """An id alone means the newest run under out/; a wrong id lists the right ones."""
    assert main(["run", "small.yaml"]) == 0
    code, answer = run_json(capsys, "show", "dp1-attn")
    assert (code, answer["verdict"]["outcome"]) == (0, "passed")
    assert main(["show", "dp9"]) == 4
    assert "dp1-attn" in capsys.readouterr().err


def test_a_damaged_verdict_is_shown_as_none(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict that does not decode is no verdict."""
    assert main(["run", "small.yaml", "--out", "r"]) == 0
    (Path("r") / "cases" / "dp1-attn" / "verdict.json").write_text("{")
    assert run_json(capsys, "show", "dp1-attn", "r")[1]["verdict"] is None


def test_a_bug_in_the_engine_is_exit_3_with_its_traceback_kept(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
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


def test_a_bug_elsewhere_is_exit_3_with_its_traceback_kept(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a run folder the traceback goes to a file that the line names."""
    monkeypatch.setattr(launch, "expand", lambda *a: 1 / 0)
    assert main(["run", "small.yaml"]) == 3
    err = capsys.readouterr().err
    path = Path(err.split("traceback: ")[1].rstrip().rstrip(")"))
    assert "ZeroDivisionError" in path.read_text()
    path.unlink()


def test_an_interrupt_ends_in_2_and_says_how_to_go_on(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM while runs are made: exit 2, the line names --resume, and resuming finishes."""

    def stop(spec: RunSpec) -> None:
        if len(engine.made) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    engine.on_start = stop
    assert main(["run", "small.yaml", "--out", "r"]) == 2
    assert "--resume" in capsys.readouterr().err
    engine.on_start = lambda spec: None
    assert main(["run", "--resume", "r"]) == 0


def test_an_interrupt_while_planning_ends_in_2(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before anything runs is the same exit code."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "expand", interrupted)
    assert main(["run", "small.yaml"]) == 2


def test_list_and_its_check(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """`list` says the cases; `--check` says every bad file, whatever comes before it."""
    assert main(["list", "small.yaml", "-k", "dp1"]) == 0
    assert capsys.readouterr().out.split() == [
        "small.yaml:", "2", "cases", "dp1-attn", "dp1-full_iteration",
    ]  # fmt: skip
    bad = Path("more")
    bad.mkdir()
    (bad / "a.yaml").write_text("nme: x\n")
    (bad / "b.yml").write_text(SCENARIO)
    (bad / "c.yaml").write_text(SCENARIO + "exclude: [{graph: [attn]}, {graph: [full_iteration]}]")
    assert main(["list", "--check", "more"]) == 5
    out, err = capsys.readouterr()
    assert out == "more/b.yml: 4 cases\n"
    assert [line.split(":")[0] for line in err.splitlines()] == ["more/a.yaml", "more/c.yaml"]
    assert main(["list", "--check", "more/a.yaml", "more/b.yml"]) == 4
    assert main(["list", "more"]) == 4
    (tmp := Path("none")).mkdir()
    assert main(["list", "--check", str(tmp)]) == 5
    assert main(["list", "small.yaml", "-k", "zzz"]) == 5


def test_list_json(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """`list --json` holds whole cases; `--check --json` one entry a file."""
    code, cases = run_json(capsys, "list", "small.yaml")
    assert (code, cases["small.yaml"][0]["id"]) == (0, "dp1-attn")
    code, checked = run_json(capsys, "list", "--check", "small.yaml")
    assert checked == [{"file": "small.yaml", "num_cases": 4, "error": "", "exit_code": 0}]


def test_report_says_its_files(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """`report` builds again and says where."""
    assert main(["run", "small.yaml", "--out", "r", "-k", "dp1-attn"]) == 0
    capsys.readouterr()
    assert main(["report", "r"]) == 0
    assert capsys.readouterr().out.strip().endswith("r/report/index.html")


def test_doctor_says_what_can_run(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """`doctor` ends well where the CPU can run, and holds the same as JSON."""
    assert main(["doctor"]) == 0
    assert "can run     device: cpu" in capsys.readouterr().out
    assert run_json(capsys, "doctor")[1]["can_run"]


def test_a_reader_that_leaves_is_no_error() -> None:
    """`harness list | head` does not end in a traceback."""
    code = (
        "import os, sys, harness.cli as c\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "sys.exit(c.main(['-h']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_two_runs_in_one_second_get_two_folders(engine: FakeEngine) -> None:
    """A default folder that is taken gets a number."""
    for _ in range(3):
        assert main(["run", "small.yaml", "-k", "dp1-attn"]) == 0
    assert len(list(Path("out").iterdir())) == 3
