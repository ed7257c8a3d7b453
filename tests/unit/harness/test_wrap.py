"""`harness wrap` and `harness compare-runs`: what is recorded of a job that is started by hand."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import main
from harness.records import ExitCode, Verdict
from harness.runner import recorded
from harness.runner.recorded import compare
from harness.store import find_verdict
from tests.support.fake_engine import Capsys, Patch, run_json

TRAIN = """
import os, signal, sys, torch, torch.distributed as dist
plant, kill = "--plant" in sys.argv, "--kill" in sys.argv
rank = int(os.environ.get("RANK", 0))
if "LOCAL_RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    if plant and step == 1 and rank == 1:
        x[0, 0] += 2**-16
    if kill and step == 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (model(x) ** 2).mean().backward()
    if dist.is_initialized():
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
if dist.is_initialized():
    dist.barrier()  # gloo's threads may abort a rank whose peer has left
    dist.destroy_process_group()
"""
PARENT = """
import os, subprocess, sys
def rank(number):
    return subprocess.Popen(sys.argv[1:], env=os.environ | {"RANK": number, "WORLD_SIZE": "2"})
killed = rank("1")
os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
rank("0").wait()
"""
"""Rank 1 has ended, and is not waited for, while rank 0 trains."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = """
import os, socket, subprocess, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
met["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
places = [met | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
ranks = [subprocess.Popen(sys.argv[1:], env=os.environ | place) for place in places]
sys.exit(max(rank.wait() for rank in ranks))
"""
"""What torchrun does, without importing torch itself."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and a job of two ranks, recorded as `a` and copied as `b`, `c`."""
    folder = tmp_path_factory.mktemp("wrapped")
    (folder / "train.py").write_text(TRAIN)
    launch = (sys.executable, "-c", LAUNCH, sys.executable, str(folder / "train.py"))
    assert wrap(folder, "a", *launch) == 0
    for name in ("b", "c"):
        shutil.copytree(folder / "a", folder / name)
    return folder


def wrap(folder: Path, name: str, *command: str, options: tuple[str, ...] = ()) -> int:
    return main(["wrap", "--out", str(folder / name), *options, "--", *command])


def script(folder: Path, *words: str, **variables: str) -> tuple[str, ...]:
    """A command that runs the script as one process, with variables of its own."""
    given = [f"{name}={value}" for name, value in variables.items()]
    return ("env", *given, sys.executable, str(folder / "train.py"), *words)


def compared(folder: Path, *words: str) -> tuple[int, Verdict]:
    out = folder / "compared"
    shutil.rmtree(out, ignore_errors=True)
    code = main(["compare-runs", "--out", str(out), *words])
    verdict = find_verdict(out / "cases" / "candidate", "candidate")[0]
    assert verdict is not None
    return code, verdict


def test_equal_runs_pass_with_a_control_and_without(lab: Path) -> None:
    """Every digest of both is equal, a third may be the control; a run with itself proves none."""
    run = recorded.load(lab / "a")
    assert (run.spec.world_size, recorded.steps_on_rank_0(run), run.outcome.what) == (2, 3, "")
    assert [(state.rank, state.code) for state in run.outcome.ranks] == [(0, 0), (1, 0)]
    assert run.spec.config["program"]["args"]["_"][-1] == str(lab / "train.py")
    a, b = str(lab / "a"), str(lab / "b")
    for same in ((a, a), (a, b, "--control", a)):
        assert main(["compare-runs", *same]) == ExitCode.USAGE
    assert compared(lab, a, b)[0] == main(["diff", a, b]) == ExitCode.PASSED
    assert main(["diff", a, a]) == ExitCode.USAGE
    code, verdict = compared(lab, a, b, "--control", str(lab / "c"))
    assert (code, verdict.outcome) == (ExitCode.PASSED, "passed")
    (control,) = (each for each in verdict.checks if each.check == "control")
    assert control.outcome == "passed"


def test_a_planted_difference_is_named_and_needs_a_control_to_be_a_failure(
    lab: Path, capsys: Capsys
) -> None:
    """Step, rank and tensor of the first difference; show, check, report and bisect read it."""
    assert wrap(lab, "planted", *TORCHRUN, str(lab / "train.py"), "--plant") == 0
    a, planted = str(lab / "a"), str(lab / "planted")
    found = {each.kind: each.difference for each in compare(lab / "a", lab / "planted").findings}
    assert (found["state"].step, found["state"].tensor) == (1, "0.weight")
    code, verdict = compared(lab, a, planted)
    assert (code, verdict.what) == (ExitCode.NO_VERDICT, "no_control")
    control = ("--control", str(lab / "b"))
    code, verdict = compared(lab, a, planted, *control)
    assert (code, verdict.what) == (ExitCode.FAILED, "diverged")
    first = verdict.difference
    assert first is not None
    assert (first.step, first.quantity, first.tensor) == (1, "grads", "0.weight")
    case = str(lab / "compared" / "cases" / "candidate")
    for words, expected in (
        (["show", case], 0), (["check", str(lab / "compared")], 1),
        (["report", str(lab / "compared")], 0), (["rerun", case], ExitCode.USAGE),
        (["compare-runs", a, planted, "--expect", "rounding"], ExitCode.USAGE),
    ):  # fmt: skip
        assert main(words) == expected, words
    assert capsys.readouterr().err.count("expected bitwise or {rtol: R}, got rounding") == 1
    code, answer = run_json(capsys, "bisect", case, "--out", str(lab / "bisected"))
    assert (code, answer["place"]["step"], answer["place"]["rank"]) == (ExitCode.FAILED, 1, 1)
    for rtol, expected in (("1e-2", ExitCode.PASSED), ("1e-12", ExitCode.FAILED)):
        code, _ = compared(lab, a, planted, *control, "--expect", f"{{rtol: {rtol}}}")
        assert code == expected
    assert main(["bisect", case]) == ExitCode.USAGE  # it follows bits


@pytest.mark.parametrize("kept", [0, 40])
def test_a_rank_whose_start_is_damaged_is_not_left_out(
    lab: Path, tmp_path: Path, kept: int
) -> None:
    """Its steps are not compared, so `diff` has no verdict."""
    path = shutil.copytree(lab / "a", tmp_path / "b") / "rank1.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in (first[:kept], *others)))
    done = compare(lab / "a", tmp_path / "b")
    assert (done.exit_code, done.compared["rank"]) == (ExitCode.NO_VERDICT, 1)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_a_command_that_records_nothing_is_no_success(alone: Path, capsys: Capsys) -> None:
    """Exit code 5 if the command says 0, else the command's; compare-runs takes no such run."""
    assert wrap(alone, "none", "true") == ExitCode.NOTHING_RAN
    assert capsys.readouterr().err.startswith("harness: recorded nothing in ")
    assert wrap(alone, "fails", "false") == 1
    words = ["compare-runs", str(alone / "none"), str(alone / "fails")]
    assert main(words) == ExitCode.USAGE


def test_a_single_process_is_rank_0_of_1_and_its_exit_code_is_kept(
    alone: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    """Without torchrun a process records once it trains; fewer steps or ranks are not whole."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    command = f"{sys.executable} {alone / 'train.py'}; exit 7"
    assert wrap(alone, "run", "sh", "-c", command) == 7
    run = recorded.load(alone / "run")
    assert (run.spec.world_size, run.outcome.what) == (1, "crashed")
    options = ("--taps", "0:output", "--steps", "4")
    code = wrap(alone, "one", *script(alone, RANK="0", WORLD_SIZE="2"), options=options)
    assert code == ExitCode.NO_VERDICT
    assert "no records of rank 1" in capsys.readouterr().err
    run = recorded.load(alone / "one")
    start = run.ranks[0].start
    assert start is not None
    assert (run.spec.world_size, run.spec.config["steps"]) == (2, 4)
    assert [name.partition("[")[0] for name in start.taps] == ["0:output"]


def test_a_folder_that_holds_something_is_refused(alone: Path) -> None:
    """Two runs in one folder would be one run of mixed ranks."""
    assert wrap(alone, "run", "true") == ExitCode.NOTHING_RAN
    assert wrap(alone, "run", "true") == ExitCode.USAGE
    (alone / "notes").mkdir()
    (alone / "notes" / "read.me").write_text("mine")
    assert wrap(alone, "notes", "true") == ExitCode.USAGE
    (alone / "note").touch()
    assert wrap(alone, "note", "true") == ExitCode.USAGE
    assert wrap(alone, "other", "no-such-command") == ExitCode.USAGE
    assert not (alone / "other").exists()


def test_parts_as_srun_starts_them_share_a_run(alone: Path, monkeypatch: Patch) -> None:
    """Two `harness wrap` of one job: one specification, one outcome; not of another step."""
    for name, value in (("JOB_ID", "12"), ("STEP_ID", "0"), ("STEP_NUM_TASKS", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    for rank in range(2):
        assert not (alone / "run" / "outcome.json").exists()
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        assert wrap(alone, "run", *script(alone)) == 0
    run = recorded.load(alone / "run")
    assert (run.spec.world_size, run.outcome.what) == (2, "")
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert wrap(alone, "run", "true") == ExitCode.USAGE


def test_parts_by_number_share_a_run(lab: Path, alone: Path, capsys: Capsys) -> None:
    """`--part I/N`, in whatever order: a rank that another part lost is named by the last one."""
    for part, rank, read, then, code in (
        ("2/2", 1, "head -n -1", "kill -9 $$", 128 + signal.SIGKILL),
        ("1/2", 0, "cat", "true", ExitCode.NO_VERDICT),
    ):
        assert not (alone / "run" / "outcome.json").exists()
        # Records of an earlier job, which the killed rank has not ended.
        name = f"rank{rank}.jsonl"
        record = f'{read} {lab}/a/{name} > "$DELTAZERO_RECORD/{name}"; {then}'
        assert wrap(alone, "run", "sh", "-c", record, options=("--part", part)) == code
    outcome = recorded.load(alone / "run").outcome
    assert (outcome.what, outcome.culprit_rank) == ("killed", 1)
    # A third joins a run that is over, and a name that is no part of N.
    assert wrap(alone, "run", "true", options=("--part", "1/2")) == ExitCode.USAGE
    for part in ("0/2", "3/2", "2", "a/b"):
        capsys.readouterr()
        assert wrap(alone, "other", "true", options=("--part", part)) == ExitCode.USAGE
        assert "--part: expected I/N with 1 <= I <= N" in capsys.readouterr().err
    assert not (alone / "other").exists()
    assert main(["wrap", "--part", "1/2", "--", "true"]) == ExitCode.USAGE


def test_how_a_rank_ended_is_known_if_its_parent_hides_it(alone: Path) -> None:
    """The command ends with 0 although its rank 1 was killed: the run says so."""
    command = (sys.executable, "-c", PARENT, *script(alone, "--kill"))
    assert wrap(alone, "run", *command) == ExitCode.NO_VERDICT
    outcome = recorded.load(alone / "run").outcome
    assert (outcome.what, outcome.culprit_rank) == ("killed", 1)
    assert [state.code for state in outcome.ranks] == [0, -signal.SIGKILL]


def test_a_signal_reaches_the_command(alone: Path) -> None:
    """SIGTERM for `harness wrap` is the command's to answer, and its exit code stays its own."""
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(23))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    words = [sys.executable, "-m", "harness", "wrap", "--out", str(alone / "run"), "--",
             sys.executable, "-c", program]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 23
    part = json.loads((alone / "run" / "part-0.json").read_text())
    assert part["stopped_by"] == signal.SIGTERM
