"""What two ranks record, each of itself."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_core.config import ParallelConfig
from harness.records import RankRecords, RunSpec
from harness.store.streams import rank_path, read_rank
from harness.worker.main import rank_main

WORLD = 2


def train(spec: RunSpec, folder: Path, rank: int, port: int) -> None:
    """One rank, in a process of its own."""
    raise SystemExit(rank_main(spec, folder, rank, port))


@pytest.fixture
def records(spec: Callable[..., RunSpec], tmp_path: Path) -> list[RankRecords]:
    """Of two data-parallel ranks, which hold other rows of each tensor."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "harness.worker.main"])
    chosen = spec(world_size=WORLD, parallel=ParallelConfig(dp=WORLD), steps=2)
    ranks = [
        context.Process(target=train, args=(chosen, tmp_path, rank, store.port))
        for rank in range(WORLD)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0] * WORLD
    return [read_rank(rank_path(tmp_path, rank), rank) for rank in range(WORLD)]


def test_each_rank_records_digests_of_its_own(records: list[RankRecords]) -> None:
    """Where ranks hold other rows, no digest of one is that of the other, before step 0 and in it.

    Norms begin as ones and moments as zeros: these may have equal rows until they are trained.
    """
    first, second = records
    assert first.start is not None
    assert second.start is not None
    assert [first.start.rank, second.start.rank] == [0, 1]
    assert first.start.tensors["grads"] != () != second.start.tensors["grads"]
    for ours, theirs in zip(first.steps, second.steps, strict=True):
        assert (ours.rank, theirs.rank) == (0, 1)
        for group in ("grads", "weights", "optim"):
            left, right = (
                digests(record.digests[group], start.tensors[group])
                for record, start in ((ours, first.start), (theirs, second.start))
            )
            shared = (set(left) & set(right)) - {"step_count"}
            assert shared
            assert not [name for name in shared if left[name] == right[name]], group
        assert ours.microbatch_losses != theirs.microbatch_losses
        assert ours.loss == theirs.loss
    assert first.initial is not None
    assert second.initial is not None
    assert first.initial.digests["weights"] != second.initial.digests["weights"]
    assert first.initial.digests["rng"] != second.initial.digests["rng"]


def digests(text: str, names: tuple[str, ...]) -> dict[str, str]:
    """Of a group, by tensor."""
    assert len(text) == 32 * len(names)
    return {name: text[32 * i : 32 * (i + 1)] for i, name in enumerate(names)}
