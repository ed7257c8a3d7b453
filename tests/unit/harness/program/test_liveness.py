"""Programs of two gloo ranks that hang, leave each other or do not exit: what their runs say."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.engine.evidence import answer_path, read_place
from harness.engine.local import LocalEngine
from harness.engine.ranks import Limits
from harness.program.spec import ProgramSpec
from harness.records import RunOutcome, RunSpec
from harness.store.streams import rank_path, read_rank

PROGRAM = """
import argparse, os, sys, time
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
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = nn.Sequential(Summing()) if mode == "functional" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        odd = (step, rank) == (1, 1)
        batch = torch.ones(2, 4)
        if mode == "stays_away" and (step, rank) == (2, 1):
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
    (number,) = (i for i, each in enumerate(PROGRAM.splitlines(), 1) if text in each)
    return f"train.py:{number + after}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the program in one of its modes; its outcome and folder."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(PROGRAM)
    # Others keep this machine busy: a stall must be one for sure.
    with LocalEngine(2, limits=Limits(leave_s=1.0)) as engine:

        def run(kind: str, mode: str) -> tuple[RunOutcome, Path]:
            program = ProgramSpec(
                kind=kind, target=TARGETS[kind].format(folder), folder=str(folder),  # type: ignore[arg-type]
                args={"mode": mode},
            )  # fmt: skip
            config = {"program": program.to_json(), "steps": 3, "taps": []}
            spec = RunSpec(config=config, device="cpu", world_size=2, timeout_s=100.0, stall_s=5.0)
            out = folder / kind / mode
            engine.start(spec, out)
            (outcome,) = engine.wait()
            return outcome, out

        yield run


@KINDS
def test_a_crash_is_of_the_step_under_way(kind: str, run: Run) -> None:
    outcome, folder = run(kind, "crash")
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
}  # fmt: skip


@pytest.mark.parametrize("mode", MISSING)
def test_a_collective_that_a_rank_never_enters(mode: str, run: Run) -> None:
    outcome, folder = run("script" if mode == "stays_away" else "entry", mode)
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1)
    entered, *others = MISSING[mode]
    for words in (f"rank 1 never entered {entered}", *others):
        assert words in outcome.message
    assert not list(folder.glob("*.ask"))


def test_swapped_collectives_disagree(run: Run) -> None:
    """Both wait in the collective of one number, each in another."""
    outcome, folder = run("entry", "swapped")
    assert outcome.what == "hang"
    assert outcome.culprit_rank is None
    answers = [read_place(answer_path(folder, rank)) for rank in range(2)]
    last = [answer.recent[-1] for answer in answers if answer is not None]
    assert {each.operator for each in last} == {"all_reduce", "broadcast"}
    assert {(each.step, each.number) for each in last} == {(1, last[0].number)}
    assert "entered all_reduce" in outcome.message
    assert "entered broadcast in step 1" in outcome.message


def test_tensors_of_other_sizes_disagree(run: Run) -> None:
    """gloo aborts a rank; whose collectives met there is told."""
    outcome, _ = run("entry", "sized")
    assert outcome.what == "crashed"
    assert "entered all_reduce" in outcome.message
    assert SUMMED in outcome.message


@KINDS
def test_a_process_that_does_not_exit_is_a_hang(kind: str, run: Run) -> None:
    """Though records are whole; nobody waits for destructors of a function that has returned."""
    outcome, folder = run(kind, "stays")
    hangs = kind == "script"
    assert outcome.what == ("hang" if hangs else "")
    assert [state.killed_by_harness for state in outcome.ranks] == [hangs, hangs]
    ends = [read_rank(rank_path(folder, rank), rank).end for rank in range(2)]
    assert [end and end.steps for end in ends] == [3, 3]


def test_a_program_that_stays_before_its_end_is_a_hang(run: Run) -> None:
    """All steps were taken, but `main` is not over."""
    outcome, _ = run("entry", "late")
    assert outcome.what == "hang"
    at = line('"late"', 1)
    assert f"at {at} in main" in outcome.message
