"""Programs of two NCCL ranks that hang: who lacks or swaps which collective, long before NCCL."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.engine.local import LocalEngine
from harness.program.spec import ProgramSpec
from harness.records import RunOutcome, RunSpec

PROGRAM = """
import argparse, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(mode="plain"):
    # Under the harness a rank sees one GPU, its own, or all of them.
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local if torch.cuda.device_count() > 1 else 0)
    torch.manual_seed(0)
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    model = DistributedDataParallel(model) if mode in ("plain", "reducer") else model
    optimizer = torch.optim.AdamW(model.parameters())
    small, large = torch.ones(8, device="cuda"), torch.ones(1 << 24, device="cuda")
    for step in range(4):
        odd = (step, rank) == (2, 1)
        loss = model(torch.ones(2, 64, device="cuda")).square().mean()
        loss.backward()
        if mode == "skipped" and not odd:
            dist.all_reduce(large)
        if mode == "swapped":
            # So small that NCCL takes another protocol for it: neither passes for the other.
            calls = [lambda: dist.broadcast(small, 0), lambda: dist.all_reduce(large)]
            for call in reversed(calls) if odd else calls:
                call()
        optimizer.step()
        loss.item()
    if mode == "reducer" and rank == 0:
        model(torch.ones(2, 64, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="plain")
    main(parser.parse_args().mode)
"""
STALL_S, SLACK_S = 15.0, 90.0
"""What starting, asking and killing may take over the limit; NCCL itself gives up after 600 s."""
Run = Callable[[str, str], RunOutcome]
pytestmark = pytest.mark.gpu(2, shared=False)
KINDS = pytest.mark.parametrize("kind", ["script", "entry"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the program in one of its modes."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(PROGRAM)
    targets = {"script": str(folder / "train.py"), "entry": "train:main"}
    with LocalEngine(2, devices=("0", "1")) as engine:

        def run(kind: str, mode: str) -> RunOutcome:
            program = ProgramSpec(
                kind=kind,  # type: ignore[arg-type]
                target=targets[kind],
                folder=str(folder),
                args={"mode": mode},
            )
            spec = RunSpec(
                config={"program": program.to_json(), "steps": 4, "taps": []},
                device="cuda", world_size=2, timeout_s=300.0, stall_s=STALL_S,
            )  # fmt: skip
            out: Path = folder / kind / mode
            engine.start(spec, out)
            (outcome,) = engine.wait()
            assert outcome.wall_s < 2 * STALL_S + SLACK_S, outcome.message
            return outcome

        yield run


@KINDS
def test_a_right_program_ends_well(kind: str, run: Run) -> None:
    """Nothing of what watches for hangs is in its way."""
    outcome = run(kind, "plain")
    assert (outcome.what, outcome.message) == ("", "")


@KINDS
def test_a_rank_that_skips_an_all_reduce(kind: str, run: Run) -> None:
    """The next all_reduce takes its place, so the last one is what the rank never enters."""
    outcome = run(kind, "skipped")
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1), outcome.message
    assert "rank 1 never entered all_reduce" in outcome.message
    assert "called at train.py:" in outcome.message


@KINDS
def test_a_rank_that_swaps_two_collectives(kind: str, run: Run) -> None:
    """The first that they entered differently is named, whichever they wait in now."""
    outcome = run(kind, "swapped")
    assert outcome.what == "hang", outcome.message
    fault = outcome.ending.collective if outcome.ending is not None else None
    assert fault is not None, outcome.message
    assert fault.entered is not None
    assert {fault.entered.operator, fault.expected.operator} == {"all_reduce", "broadcast"}
    assert (fault.step, {*fault.ranks, *fault.others}) == (2, {0, 1})


@KINDS
def test_a_rank_that_takes_a_step_more_waits_in_ddps_reducer(kind: str, run: Run) -> None:
    """The reducer's collective is called by C++, on a thread without a Python stack."""
    outcome = run(kind, "reducer")
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1), outcome.message
    assert "rank 1 never entered all_reduce" in outcome.message
