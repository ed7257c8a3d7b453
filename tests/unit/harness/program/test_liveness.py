"""Programs of two gloo ranks that hang, leave each other or do not exit: what their runs say."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.engine.collective_log import answer_path, read_place
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
        if mode == "early" and step == 0:
            raise ValueError("planted")
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
KINDS = pytest.mark.parametrize("kind", ["script", "entry"])


def line(text: str) -> str:
    """`train.py:N` of the only line of the program that has this text."""
    (number,) = (i for i, each in enumerate(PROGRAM.splitlines(), 1) if text in each)
    return f"train.py:{number}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the program in one of its modes; its outcome and folder."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(PROGRAM)
    targets = {"script": str(folder / "train.py"), "entry": "train:main"}
    # Others keep this machine busy: a stall must be one for sure.
    with LocalEngine(2, limits=Limits(leave_s=1.0)) as engine:

        def run(kind: str, mode: str) -> tuple[RunOutcome, Path]:
            program = ProgramSpec(
                kind=kind, target=targets[kind], folder=str(folder), args={"mode": mode},  # type: ignore[arg-type]
            )  # fmt: skip
            config = {"program": program.to_json(), "steps": 3, "taps": []}
            spec = RunSpec(config=config, device="cpu", world_size=2, timeout_s=100.0, stall_s=5.0)
            out = folder / kind / mode
            engine.start(spec, out)
            (outcome,) = engine.wait()
            return outcome, out

        yield run


@KINDS
@pytest.mark.parametrize(("mode", "step"), [("early", 0), ("crash", 1)])
def test_a_crash_is_of_the_step_under_way(kind: str, mode: str, step: int, run: Run) -> None:
    """Before the first forward pass it is before step 0; later it is in its step."""
    outcome, folder = run(kind, mode)
    error = read_rank(rank_path(folder, 1), 1).error
    assert outcome.what == "crashed"
    assert error is not None
    assert error.step == (-1 if mode == "early" else step)
    when = "before its first step" if mode == "early" else "at step 1"
    assert f"{when}: ValueError: planted" in outcome.message


@KINDS
def test_a_step_more_than_the_others_take_waits_in_ddps_reducer(kind: str, run: Run) -> None:
    """C++ calls that collective: it is named all the same, with the line of the backward pass."""
    outcome, _ = run(kind, "more")
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1)
    assert f"rank 1 never entered {SUMMED} in step 3" in outcome.message
    at = line("        model(batch).square()")
    assert f"called at {at} in main" in outcome.message


@KINDS
def test_a_functional_collective_that_a_rank_leaves_out(kind: str, run: Run) -> None:
    """No wrapped method is called: the line of the module that waits is known."""
    outcome, _ = run(kind, "functional")
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1)
    assert "rank 1 never entered all_reduce" in outcome.message
    assert f"called at {line('functional.all_reduce(x')} in forward" in outcome.message


def test_a_rank_that_stays_away_from_the_reducer(run: Run) -> None:
    """Ranks that are asked say step, phase and line; nobody waits for gloo's half an hour."""
    outcome, folder = run("script", "stays_away")
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1)
    assert f"rank 1 never entered {SUMMED} in step 2" in outcome.message
    assert "no rank recorded anything for 5 s" in outcome.message
    away = line('mode == "stays_away"').partition(":")[2]
    assert f"rank 1 in step 2 at train.py:{int(away) + 1} in main" in outcome.message
    assert f"rank 0 in step 2, backward at {line('        used(batch)')} in main" in outcome.message
    assert not list(folder.glob("*.ask"))


@KINDS
def test_swapped_collectives_disagree(kind: str, run: Run) -> None:
    """Both wait in the collective of one number, each in another."""
    outcome, folder = run(kind, "swapped")
    assert outcome.what == "hang"
    assert outcome.culprit_rank is None
    answers = [read_place(answer_path(folder, rank)) for rank in range(2)]
    assert all(answer is not None for answer in answers)
    last = [answer.recent[-1] for answer in answers if answer is not None]
    assert {each.operator for each in last} == {"all_reduce", "broadcast"}
    assert last[0].number == last[1].number
    assert {each.step for each in last} == {1}
    assert "entered all_reduce" in outcome.message
    assert "entered broadcast in step 1" in outcome.message


def test_tensors_of_other_sizes_disagree(run: Run) -> None:
    """gloo aborts a rank; whose collectives met there is told."""
    outcome, _ = run("entry", "sized")
    assert outcome.what == "crashed"
    assert "entered all_reduce" in outcome.message
    assert SUMMED in outcome.message


def test_a_process_that_does_not_exit_is_a_hang(run: Run) -> None:
    """The records are whole; its user would wait for ever all the same."""
    outcome, folder = run("script", "stays")
    assert outcome.what == "hang"
    assert all(state.killed_by_harness for state in outcome.ranks)
    for rank in range(2):
        end = read_rank(rank_path(folder, rank), rank).end
        assert end is not None
        assert end.steps == 3
    assert all(state.killed_by_harness for state in outcome.ranks)


def test_an_entry_leaves_without_what_a_process_does_at_its_end(run: Run) -> None:
    """Nobody waits for destructors of a function that has returned."""
    outcome, _ = run("entry", "stays")
    assert outcome.what == ""
    assert not any(state.killed_by_harness for state in outcome.ranks)


@KINDS
def test_a_program_that_stays_before_its_end_is_a_hang(kind: str, run: Run) -> None:
    """All steps were taken, but `main` is not over."""
    outcome, _ = run(kind, "late")
    assert outcome.what == "hang"
    at = int(line('"late"').partition(":")[2]) + 1
    assert f"at train.py:{at} in main" in outcome.message
