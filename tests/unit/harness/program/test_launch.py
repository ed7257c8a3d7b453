"""One rank of a program, and programs through `harness run`: scripts, functions, captured steps."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engine.evidence import answer_path, read_place
from harness.engine.local import LocalEngine
from harness.engine.ranks import Limits
from harness.program.spec import SITE, ProgramSpec, command, environment, run_program
from harness.records import RankRecords, RunOutcome, RunSpec, Verdict
from harness.store import find_verdict
from harness.store.streams import rank_path, read_rank
from tests.support.entry_graph import verdicts_of_modes
from tests.unit.harness.recorder.recorded import record_folder

ENTRY = """
import atexit, sys, threading
from pathlib import Path
import torch

def main(how, steps=2):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    if how == "exit":
        sys.exit(0)
    if how == "exit 3":
        sys.exit(3)
    if how == "argv":
        sys.exit(0 if sys.argv == ["entry_program:main"] else 5)
    if how in ("thread", "raise"):
        here, after = Path(__file__), threading.main_thread().join
        atexit.register(here.with_name("tidied").touch)
        threading.Thread(target=lambda: (after(), here.with_name("joined").touch())).start()
    if how == "raise":
        raise ValueError("by intent")
    return 4 if how == "return 4" else None
"""


def called(how: str, folder: Path) -> tuple[int, RankRecords]:
    """Exit code and records of a rank that calls `main(how)`."""
    (folder / "entry_program.py").write_text(ENTRY)
    program = ProgramSpec(
        kind="entry", target="entry_program:main", folder=str(folder), args={"how": how}
    )
    out = record_folder(folder / "run", **program.to_json())
    pid = os.fork()
    if pid == 0:
        code: object = 99
        torch.set_num_threads(1)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        with contextlib.suppress(Exception):
            try:
                code = run_program(program, out, "key")
            except SystemExit as stop:
                code = stop.code
        os._exit(code if isinstance(code, int) else 0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), read_rank(rank_path(out, 0), 0)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("", 0),
        ("exit", 0),
        ("exit 3", 3),
        ("return 4", 4),
        ("raise", 99),
        ("argv", 0),
        ("thread", 0),
    ],
)
def test_how_a_function_may_end(how: str, code: int, tmp_path: Path) -> None:
    """Leaving by sys.exit is an end as returning is; only an exception is an error.

    Threads are waited for, and what was registered is called, as where an interpreter ends.
    """
    found, records = called(how, tmp_path)
    assert found == code
    assert len(records.steps) == 2
    assert (records.end is None) == (how == "raise")
    assert (records.error is not None) == (how == "raise")
    assert not records.problems
    tidy = {path.name for path in tmp_path.iterdir()} >= {"tidied", "joined"}
    assert tidy == (how in ("thread", "raise"))


def test_the_environment_is_that_of_torchrun(tmp_path: Path) -> None:
    """The recorder comes first on the path; the program's own variables come last."""
    mine = {"NCCL_NVLS_ENABLE": "1", "MINE": "2"}
    program = ProgramSpec(
        kind="script", target="/x/train.py", folder="/x", env=mine, determinism="enforce"
    )
    found = environment(program, tmp_path, {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": "/mine"})
    assert found["PYTHONPATH"].split(os.pathsep) == [str(SITE), str(SITE.parents[2]), "/mine"]
    assert found["DELTAZERO_RECORD"] == str(tmp_path)
    assert (found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == ("1", "2")
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (found["NCCL_NVLS_ENABLE"], found["MINE"]) == ("1", "2")
    found = environment(replace(program, env={"PYTHONPATH": "libs"}), tmp_path, {"PYTHONPATH": "x"})
    assert found["PYTHONPATH"].split(os.pathsep) == [str(SITE), str(SITE.parents[2]), "libs"]


def test_a_module_is_found_in_the_scenarios_folder(tmp_path: Path) -> None:
    """`python -m` looks there, whatever folder the harness runs in."""
    program = ProgramSpec(kind="module", target="pkg.train", folder="/x", args={"lr": 1})
    assert "/x" in environment(program, tmp_path, {})["PYTHONPATH"].split(os.pathsep)
    assert command(program) == [sys.executable, "-m", "pkg.train", "--lr", "1"]


PROGRAM = """
import argparse, os
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(mode="plain"):
    torch.manual_seed(0)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=mode != "loop")
    mark = Path(__file__).with_name("rare.mark")
    if mode == "rare" and rank == 1 and mark.exists():
        mark.unlink()  # whoever comes first
        mode = "planted"
    for step in range(4):
        optimizer.zero_grad()
        batch = torch.full((2, 4), 1.0 + step + rank)
        if mode == "planted" and (step, rank) == (2, 1):
            batch[0, 0] += 2**-18
        model(batch).square().mean().backward()
        optimizer.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    main(parser.parse_args().mode)
"""
SCENARIO = """
name: {name}
why: A program of a user, end to end.
program: {{{kind}, ranks: {ranks}, steps: 4, taps: ["*:input"]}}
axes: {{args.mode: {modes}}}
compare: {{axis: args.mode, reference: plain, expect: bitwise}}
checks: {{loss: {{}}, state: {{}}, taps: {{}}, finite: {{}}}}
launch: {{device: cpu, timeout_s: 120, confirm: {confirm}}}
"""


def run(folder: Path, **keys: Any) -> tuple[int, dict[str, Verdict], Path]:
    """Exit code, verdicts by the candidate's mode, and the folder of a scenario's run."""
    (folder / "train.py").write_text(PROGRAM)
    scenario = folder / f"{keys['name']}.yaml"
    scenario.write_text(SCENARIO.format(**keys))
    out = folder / keys["name"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DELTA")}
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(scenario), "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=240,
        env=environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    verdicts = {}
    for path in out.glob("**/verdict.json"):
        verdict = find_verdict(path.parent, json.loads(path.read_text())["case_id"])[0]
        assert verdict is not None
        verdicts[verdict.case_id] = verdict
    assert verdicts, done.stdout + done.stderr
    return done.returncode, verdicts, out


def test_two_ranks_of_a_script(tmp_path: Path) -> None:
    """Step, rank and tensor of a planted difference are fields."""
    code, verdicts, _ = run(tmp_path, name="of_script", kind="script: train.py", ranks=2,
                            modes="[plain, planted]", confirm="false")  # fmt: skip
    (verdict,) = verdicts.values()
    found = verdict.difference
    assert found is not None
    assert (code, found.step, found.rank, found.quantity) == (1, 2, 1, "taps.input")


def test_a_difference_comes_again_or_not(tmp_path: Path) -> None:
    """A neutral change passes, a rare fault stays a failure; of a function, as ranks are forked."""
    (tmp_path / "rare.mark").touch()
    code, verdicts, _ = run(tmp_path, name="of_entry", kind="entry: train:main", ranks=2,
                            modes="[plain, loop, planted, rare]", confirm="true")  # fmt: skip
    loop, planted, rare = (
        next(verdict for case, verdict in verdicts.items() if mode in case)
        for mode in ("loop", "planted", "rare")
    )
    assert code == 1
    assert (loop.outcome, loop.confirmation) == ("passed", None), loop.message
    found = planted.difference
    assert found is not None
    assert (found.step, found.rank, found.quantity) == (2, 1, "taps.input")
    (of_state,) = [each.difference for each in planted.checks if each.check == "state"]
    assert of_state is not None
    assert (of_state.step, of_state.quantity, of_state.tensor) == (2, "grads", "0.weight")
    for verdict, came in ((planted, "came_again"), (rare, "did_not_come_again")):
        assert (verdict.outcome, verdict.what) == ("failed", "diverged")
        again = verdict.confirmation
        assert again is not None
        assert again.outcome == came
        assert (again.reference_repeats, again.candidate_repeats) == (True, verdict is planted)


def test_a_graphed_entry_and_its_faults(tmp_path: Path) -> None:
    """Under stressors replays agree with eager steps, and all four of both ranks are counted."""
    verdicts = verdicts_of_modes(
        tmp_path / "run", ranks=2, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
    )
    right = verdicts["graph"]
    assert right.outcome == "passed", right.message
    (of_graphs,) = [check for check in right.checks if check.check == "graphs"]
    assert of_graphs.figures["replays"] == 8
    # An input that is not copied: the loss names the rank, the state what it came to.
    stale = verdicts["stale_input"]
    assert (stale.outcome, stale.what) == ("failed", "diverged")
    found = {check.check: check.difference for check in stale.checks if check.difference}
    assert (found["loss"].step, found["loss"].rank) == (3, 1)
    of_state = found["state"]
    assert (of_state.step, of_state.quantity, of_state.tensor) == (3, "grads", "layers.0.weight")
    # A buffer that is replaced: the replay is refused, and the buffer has its name.
    replaced = verdicts["replaced_buffer"]
    assert (replaced.outcome, replaced.what) == ("failed", "stale_address")
    assert ": scale: captured at " in replaced.message
    # A program that captures nothing: its bits are eager's, and that proves nothing.
    nothing = verdicts["nothing"]
    assert (nothing.outcome, nothing.what) == ("failed", "not_replayed")
    assert [check.check for check in nothing.checks if check.outcome != "passed"] == ["graphs"]


# --- programs of two gloo ranks that hang, leave each other or do not exit: what their runs say ---


SILENT = """
import argparse, os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        return self.inner(functional.all_reduce(x, "sum", dist.group.WORLD) + 0)


class Stays:
    def __del__(self, sleep=time.sleep):
        sleep(1000)  # as gloo's destructor may


def main(mode="plain"):
    if mode == "again" and "AGAIN" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "AGAIN": "1"})
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = nn.Sequential(Summing()) if mode == "functional" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if mode.endswith("dies"):  # when it is to print its stacks
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    for step in range(3):
        odd = (step, rank) == (1, 1)
        batch = torch.ones(2, 4)
        if mode.startswith("stays_away") and (step, rank) == (2, 1):
            time.sleep(1000)
        used = model[0].inner if mode == "functional" and odd else model
        used(batch).square().mean().backward()
        if mode == "crash" and odd:
            raise ValueError("planted")
        if mode == "swapped" and step == 1:
            calls = [lambda: dist.broadcast(batch, 0), lambda: dist.all_reduce(batch)]
            for call in reversed(calls) if odd else calls:
                call()
        if mode == "sized" and step == 1 and not odd:
            dist.all_reduce(torch.ones(3))
        if mode == "received" and odd:
            dist.recv(batch, 0)
        if mode == "rooted" and step == 1:
            dist.broadcast(batch, rank)
        if mode == "typed" and step == 1:
            dist.all_reduce(batch.double() if odd else batch)
        if mode == "monitored" and odd:
            dist.monitored_barrier()
        if mode == "crossed" and step == 1:
            groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
            for group in reversed(groups) if odd else groups:
                dist.all_reduce(batch, group=group)
        optimizer.step()
    if mode == "more" and rank == 0:
        model(batch).square().mean().backward()
    if mode == "late":
        time.sleep(1000)
    dist.destroy_process_group()
    sys.stays = Stays() if mode == "stays" else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="plain")
    main(parser.parse_args().mode)
"""
SUMMED = "all_reduce of DistributedDataParallel's reducer"
Run = Callable[[str, str], tuple[RunOutcome, Path]]
TARGETS = {"script": "{}/train.py", "entry": "train:main"}
KINDS = pytest.mark.parametrize("kind", TARGETS)


def line(text: str, after: int = 0) -> str:
    """`train.py:N` of the only line of the program that has this text, or of one after it."""
    (number,) = (i for i, each in enumerate(SILENT.splitlines(), 1) if text in each)
    return f"train.py:{number + after}"


@pytest.fixture(scope="module")
def silent_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the program in one of its modes; its outcome and folder."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(SILENT)
    # Others keep this machine busy: a stall must be one for sure.
    with LocalEngine(2, limits=Limits(leave_s=1.0)) as engine:

        def silent_run(kind: str, mode: str) -> tuple[RunOutcome, Path]:
            program = ProgramSpec(
                kind=kind, target=TARGETS[kind].format(folder), folder=str(folder),  # type: ignore[arg-type]
                args={"mode": mode},
            )  # fmt: skip
            config = {"program": program.to_json(), "steps": 3, "taps": []}
            spec = RunSpec(config=config, device="cpu", world_size=2, timeout_s=100.0,
                           stall_s=None if mode == "again" else 5.0)  # fmt: skip
            out = folder / kind / mode
            engine.start(spec, out)
            (outcome,) = engine.wait()
            return outcome, out

        yield silent_run


@KINDS
def test_a_crash_is_of_the_step_under_way(kind: str, silent_run: Run) -> None:
    outcome, folder = silent_run(kind, "crash")
    error = read_rank(rank_path(folder, 1), 1).error
    assert (outcome.what, error and error.step) == ("crashed", 1)
    assert "at step 1: ValueError: planted" in outcome.message


MISSING = {
    # C++ calls that collective: it is named all the same, with the line of the backward pass.
    "more": (f"{SUMMED} in step 3", f"called at {line('        model(batch).square()')} in main"),
    # No wrapped method is called: the line of the module that waits is known.
    "functional": ("all_reduce", f"called at {line('functional.all_reduce(x')} in forward"),
    # Ranks that are asked say step, phase and line; nobody waits for gloo's half an hour.
    "stays_away": (
        f"{SUMMED} in step 2", "no rank recorded anything for 5 s",
        f"rank 1 in step 2 at {line('stays_away', 1)} in main",
        f"rank 0 in step 2, backward at {line('        used(batch)')} in main",
    ),
    # A rank that printing its stacks ends has said before that where it is.
    "stays_away_and_dies": (f"{SUMMED} in step 2", "no rank recorded anything for 5 s"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MISSING)
def test_a_collective_that_a_rank_never_enters(mode: str, silent_run: Run) -> None:
    outcome, folder = silent_run("script" if mode.startswith("stays_away") else "entry", mode)
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1)
    entered, *others = MISSING[mode]
    for words in (f"rank 1 never entered {entered}", *others):
        assert words in outcome.message
    assert not list(folder.glob("*.ask"))


def test_swapped_collectives_disagree(silent_run: Run) -> None:
    """Both wait in the collective of one number, each in another."""
    outcome, folder = silent_run("entry", "swapped")
    assert outcome.what == "hang"
    assert outcome.culprit_rank is None
    answers = [read_place(answer_path(folder, rank)) for rank in range(2)]
    last = [answer.recent[-1] for answer in answers if answer is not None]
    assert {each.operator for each in last} == {"all_reduce", "broadcast"}
    assert {(each.step, each.number) for each in last} == {(1, last[0].number)}
    assert "entered all_reduce" in outcome.message
    assert "entered broadcast in step 1" in outcome.message


def test_tensors_of_other_sizes_disagree(silent_run: Run) -> None:
    """gloo aborts a rank; whose collectives met there is told."""
    outcome, _ = silent_run("entry", "sized")
    assert outcome.what == "crashed"
    assert "entered all_reduce" in outcome.message
    assert SUMMED in outcome.message


WAYS = {
    "received": ("hang", {SUMMED, "recv"}, set()),
    "crossed": ("hang", {"all_reduce"}, {"[[2, 4]] Float"}),
    "rooted": ("hang", {"broadcast"}, {"[[2, 4]] Float, root 0", "[[2, 4]] Float, root 1"}),
    "typed": ("crashed", {"all_reduce"}, {"[[2, 4]] Float", "[[2, 4]] Double"}),
    "monitored": ("hang", {SUMMED, "monitored_barrier"}, set()),
}  # fmt: skip
"""What happened; what ranks entered of what sizes, where both have some."""


@pytest.mark.parametrize("mode", WAYS)
def test_each_of_two_ranks_waits_for_the_other(mode: str, silent_run: Run) -> None:
    """In a message, another group, with another root or type: of both sides it is told where."""
    what, calls, sizes = WAYS[mode]
    outcome, _ = silent_run("entry", mode)
    fault = None if outcome.ending is None else outcome.ending.collective
    assert fault is not None, outcome.message
    assert fault.entered is not None
    assert (outcome.what, {*fault.ranks, *fault.others}) == (what, {0, 1})
    assert {str(fault.entered), str(fault.expected)} == calls
    assert fault.step in ((2,) if SUMMED in calls and fault.others == (0,) else (1,))
    assert not sizes or {fault.entered.sizes, fault.expected.sizes} == sizes
    if what == "hang":
        assert outcome.culprit_rank is None


@KINDS
def test_a_process_that_does_not_exit_is_a_hang(kind: str, silent_run: Run) -> None:
    """Though records are whole; nobody waits for destructors of a function that has returned."""
    outcome, folder = silent_run(kind, "stays")
    hangs = kind == "script"
    assert outcome.what == ("hang" if hangs else "")
    assert [state.killed_by_harness for state in outcome.ranks] == [hangs, hangs]
    ends = [read_rank(rank_path(folder, rank), rank).end for rank in range(2)]
    assert [end and end.steps for end in ends] == [3, 3]


def test_a_program_that_stays_before_its_end_is_a_hang(silent_run: Run) -> None:
    """All steps were taken, but `main` is not over."""
    outcome, _ = silent_run("entry", "late")
    assert outcome.what == "hang"
    at = line('"late"', 1)
    assert f"at {at} in main" in outcome.message


def test_a_program_that_starts_itself_again_is_recorded(silent_run: Run) -> None:
    """With torch imported before, as programs do that set variables for themselves."""
    outcome, out = silent_run("script", "again")
    assert outcome.what == "", outcome.message
    assert [len(read_rank(rank_path(out, rank), rank).steps) for rank in range(2)] == [3, 3]
