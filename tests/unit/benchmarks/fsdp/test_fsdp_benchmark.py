"""The benchmark of sharded training: reading traces, judging figures, isolating engines."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.fsdp.launch import Result, combine, run, start_server
from benchmarks.fsdp.measure import Job
from benchmarks.fsdp.report import rows
from benchmarks.fsdp.trace import described, summarise
from benchmarks.room import NoGpus, find_room

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, stream: int, begin_us: float, end_us: float) -> dict[str, Any]:
    """An event as `torch.profiler` writes it."""
    return {"ph": "X", "cat": "kernel", "name": name, "tid": stream, "args": {"stream": stream},
            "ts": begin_us, "dur": end_us - begin_us}  # fmt: skip


STEP: list[dict[str, Any]] = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0.0, "dur": 900.0},
    {"ph": "M", "name": "process_name", "args": {}},
    kernel(GATHER, 20, 0, 100),  # nothing to hide behind
    kernel("gemm", 7, 100, 300),
    kernel(GATHER, 20, 110, 210),  # hidden whole
    kernel("split_with_sizes_copy", 21, 300, 400),  # a copy beside compute hides nothing
    kernel(GATHER, 20, 290, 390),  # a tenth is hidden
    kernel("gemm", 7, 400, 600),
    kernel(REDUCE, 22, 550, 650),  # half is hidden
    kernel(REDUCE, 22, 660, 700),
]


def test_summary_of_a_trace() -> None:
    """Collectives are counted by kind, and time not hidden by the compute stream is found."""
    summary = summarise(reversed(STEP))
    assert summary.counts == {"AllGather": 3, "ReduceScatter": 2}
    assert (summary.step_ms, summary.compute_ms) == (0.7, 0.4)
    assert summary.comm_ms == pytest.approx(0.44, abs=1e-12)
    assert summary.exposed_ms == pytest.approx(0.1 + 0.09 + 0.05 + 0.04, abs=1e-12)
    exposed = [(c.kind, c.number, c.exposed_us) for c in summary.exposed]
    assert exposed == [("AllGather", 1, 100.0), ("AllGather", 3, 90.0),
                       ("ReduceScatter", 1, 50.0), ("ReduceScatter", 2, 40.0)]  # fmt: skip
    assert "AllGather 3 of 3, 90 of 100 us" in described(summary)[3]


def test_collectives_at_once_count_once_and_a_trace_may_have_none() -> None:
    """Communication that goes on twice at a time is not twice as long."""
    events = [kernel(GATHER, 20, 0, 100), kernel(REDUCE, 22, 50, 150), kernel("gemm", 7, 140, 200)]
    summary = summarise(events)
    assert (summary.comm_ms, summary.exposed_ms) == (0.15, 0.14)
    summary = summarise(STEP[:2])
    assert summary.counts == {}
    assert described(summary)[1].startswith("collectives: none")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GATHER, "AllGather"),
        (REDUCE, "ReduceScatter"),
        ("ncclSymkDevKernel_ReduceScatter_LL_sum_bf16(ncclSymkDevWorkArgs)", "ReduceScatter"),
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(args)", "AllReduce"),
        ("ncclDevKernel_Generic_1(args)", "other"),
    ],
)
def test_names_of_collectives(name: str, kind: str) -> None:
    """NCCL's kernels are told apart by name, and an unknown one is still communication."""
    assert summarise([kernel(name, 20, 0, 1)]).counts == {kind: 1}


def result(engine: str, times_ms: list[float], second_loss: float = 2.5, **more: Any) -> Result:
    """A measurement that went well."""
    return replace(
        Result("decoder", engine, number=0, seconds=1.0),
        times_ms=times_ms,
        reserved_gib=10.0,
        losses=((3.0, second_loss, 2.0),),
        last_loss_bits="bits of 2.0",
        **more,
    )


def judged(*results: Result) -> dict[str, Any]:
    """Rows by engine."""
    return {row.engine: row for row in rows(results)}


def test_ratios_are_to_the_peer_of_the_same_kind() -> None:
    """Times of all rounds are pooled, and compiled engines are compared with a compiled FSDP2."""
    found = judged(
        result("ours", [10.0, 30.0]), result("fsdp2", [40.0]), result("ours", [20.0]),
        result("ours_compiled", [10.0]),
        replace(result("fsdp2_compiled", [12.0]), reserved_gib=20.0),
    )  # fmt: skip
    assert found["ours"].step_ms == (12.0, 20.0, 28.0)
    assert found["ours"].speed == 2.0
    assert found["ours_compiled"].speed == 1.2
    assert found["ours_compiled"].reserved_ratio == 0.5
    assert "last loss has fsdp2's bits" in found["ours"].notes


PEER = replace(result("fsdp2", [1.0]), losses=((3.0, 2.5, 2.0), (4.0, 3.5, 3.0)))
CUT = Result("decoder", "fsdp2", 0, 0.0, error="not run: out of time")


def of_losses(*losses: tuple[float, float, float]) -> Result:
    return replace(PEER, engine="ours", losses=losses, last_loss_bits="other")


@pytest.mark.parametrize(
    ("mine", "peer", "note"),
    [
        *((result("ours", [1.0], loss), result("fsdp2", [1.0]),
           "SECOND LOSS DIFFERS from fsdp2's on ranks 0") for loss in (2.6, math.nan)),
        # A rank whose weights are others than rank 0's is named.
        (of_losses((3.0, 2.5, 2.0), (4.0, 3.6, 3.0)), PEER,
         "SECOND LOSS DIFFERS from fsdp2's on ranks 1"),
        # However little the peer's loss moves, one that moves by none of it, or twice it, is wrong.
        *((result("ours", [1.0], second), result("fsdp2", [1.0], 2.9988), note)
          for second, note in ((2.999, ""), (3.0, "LOSS DOES NOT MOVE as fsdp2's"),
                               (2.9975, "LOSS DOES NOT MOVE as fsdp2's"))),
        # Sums without a fixed order make two right runs differ; neither ends in NaN.
        (of_losses((3.0, 2.5, 2.2), (4.0, 3.5, 3.0)), PEER, ""),
        (of_losses((3.0, 2.5, math.nan), (4.0, 3.5, 3.0)), PEER, None),
        # A peer that was asked for and has no figures lets nothing pass.
        (result("ours", [1.0]), CUT, "losses compared with nothing: fsdp2 has no figures"),
        (result("limit", [1.0], 2.6), result("fsdp2", [1.0]), ""),  # it does not train
        (result("ours", [1.0]), None, ""),
    ],
)  # fmt: skip
def test_an_engine_whose_losses_are_not_the_peers_is_not_right(
    mine: Result, peer: Result | None, note: str | None
) -> None:
    """On any rank; it is flagged with the reason."""
    found = judged(mine, *([peer] if peer else []))[mine.engine]
    assert found.is_right == (note == "")
    assert not note or note in found.notes


def test_the_slowest_rank_counts() -> None:
    """Times are those of the slowest rank, memory is the most of any, losses are of all ranks."""
    base = {"device": "CPU", "losses": (1.0, 0.7, 0.5), "last_loss_bits": "a", "graphs": 1,
            "graph_breaks": 0, "late_graphs": 0}  # fmt: skip
    ranks = [
        base | {"times_ms": [1.0, 9.0, 2.0], "allocated_gib": 3.0, "reserved_gib": 4.0},
        base | {"times_ms": [3.0, 3.0, 3.0], "allocated_gib": 2.0, "reserved_gib": 5.0},
    ]
    whole = combine(Result("stack", "ours", 0, 1.0), ranks)
    assert whole.times_ms == [3.0, 3.0, 3.0]
    assert (whole.allocated_gib, whole.reserved_gib) == (3.0, 5.0)
    assert whole.losses == ((1.0, 0.7, 0.5),) * 2
    assert whole.last_loss_bits == "a a"


JOB = Job(
    workload="stack", engine="fsdp2", ranks=2, steps=2, reduce="bf16", devices=(), tiny=True,
    compile_backend="eager", folder="", timeout_s=120.0,
)  # fmt: skip


@pytest.fixture
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_server()


@pytest.mark.usefixtures("_server")
def test_engines_are_isolated() -> None:
    """One that raises and one that hangs become errors, and the next is measured all the same.

    Ours has the bits of torch FSDP2's loss after the same steps.
    """
    raised = run(replace(JOB, engine="megatron_exp", reduce="fp32"), 0)
    assert raised.error is not None
    assert "ValueError: Expected a reduction in bf16" in raised.error
    hung = run(replace(JOB, timeout_s=0.01), 0)
    assert hung.error is not None
    assert "hung" in hung.error
    torch_result, our_result = run(JOB, 0), run(replace(JOB, engine="ours"), 0)
    assert (torch_result.error, our_result.error) == (None, None)
    assert len(our_result.times_ms) == 2
    assert our_result.last_loss_bits == torch_result.last_loss_bits
    assert all(last < second < first for first, second, last in torch_result.losses)
    assert len(torch_result.losses) == 2


# --- ranks of a benchmark: as many as there are GPUs up to eight, or several to a GPU -------------


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (4, 4), (8, 8), (16, 8)])
def test_every_gpu_has_a_rank_up_to_eight(
    gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without options nothing is left idle on a machine of eight, and nothing is shared."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    room = find_room("cuda", None, None)
    assert room.devices == tuple(str(gpu) for gpu in range(ranks))
    assert room.described() == {"gpus": ranks, "ranks": ranks, "shared_gpus": False}


@pytest.mark.usefixtures("_two_gpus")
def test_ranks_share_gpus_only_where_asked_and_needed() -> None:
    """Eight ranks on two GPUs are marked; two on two are not, whatever is allowed."""
    assert find_room("cuda", 8, 4).devices == ("0", "1") * 4
    assert find_room("cuda", None, 4).described() == {"gpus": 2, "ranks": 8, "shared_gpus": True}
    assert not find_room("cuda", 2, 4).shares_gpus
    for ranks_per_gpu in (None, 3):
        with pytest.raises(NoGpus, match="found 2"):
            find_room("cuda", 8, ranks_per_gpu)
