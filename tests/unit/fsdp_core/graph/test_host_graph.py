"""The host graph's contract: what a replay reads, what it keeps, what it refuses, its memory."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.device import Device
from fsdp_core.graph.device_graphs import HostGraph, plan_arena
from fsdp_core.graph.recorder import CaptureRefused, Ledger, StaleAddress


def test_no_python_runs_in_a_replay() -> None:
    """The program's Python runs once, at the capture; a flag frozen then stays frozen."""
    x, calls = torch.ones(3), []

    def function() -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    graph = HostGraph(Device("cpu"))
    result = graph.capture(function)
    graph.replay()
    graph.replay()
    assert calls == [1]
    assert (result == 2).all()


def test_outputs_keep_their_values_until_the_next_replay() -> None:
    """What escapes has its own memory: other allocations and eager work do not touch it."""
    x = torch.ones(64)
    graph = HostGraph(Device("cpu"))
    first, second = graph.capture(lambda: (x + 1, (x * 3).tanh() * 2))
    graph.replay()
    held = [first.tolist(), second.tolist()]
    noise = [torch.full((64,), float("nan")) for _ in range(50)]
    x.zero_()
    assert [first.tolist(), second.tolist()] == held
    del noise
    graph.replay()
    assert [first.tolist(), second.tolist()] != held


@pytest.mark.parametrize("how", ["moved", "shrunk", "freed"])
def test_replay_over_moved_memory_is_refused(how: str) -> None:
    """When an external storage moved, shrank or was freed, the replay does not run at all."""
    device = Device("cpu")
    x, y = torch.ones(1 << 16), torch.zeros(4)
    graph = HostGraph(device)
    graph.capture(lambda: y.add_(x.sum()))
    storage = x.untyped_storage()
    nbytes = storage.nbytes()
    # Growing allocates before it frees: the one way to move a storage for certain.
    device.resize_storage(storage, {"moved": 2 * nbytes, "shrunk": nbytes // 2, "freed": 0}[how])
    with pytest.raises(RuntimeError, match=f"illegal memory access: the storage of {nbytes} bytes"):
        graph.replay()
    assert (y == 0).all()


@pytest.mark.parametrize("view", [torch.real, torch.conj], ids=["plain", "conj"])
def test_a_graph_keeps_no_external_storage(view: Callable[[Any], Any]) -> None:
    """What the program has dropped since the capture is freed, and missed by ledger and replay."""
    dropped = [torch.ones(1 << 9, dtype=torch.complex64)]
    kept, out = torch.ones(4), torch.zeros(4)
    graph = HostGraph(Device("cpu"))
    graph.capture(lambda: out.add_(kept).add_(2 * view(dropped[0]).sum().real))
    ledger = Ledger(graph.recording, lambda: {"kept": kept, "out": out})
    ledger.check()
    graph.replay()
    assert (out == 1 + 1024).all()
    dropped.clear()
    with pytest.raises(StaleAddress, match="freed since the capture"):
        ledger.check()
    with pytest.raises(RuntimeError, match="illegal memory access: the storage of 4096 bytes"):
        graph.replay()
    assert (out == 1 + 1024).all()


def test_a_storage_freed_inside_is_refused() -> None:
    """Reading a storage from before the capture and freeing it inside cannot be replayed."""
    device, x = Device("cpu"), torch.ones(1 << 12)

    def function() -> torch.Tensor:
        x.add_(1)
        total = x.sum()
        device.resize_storage(x.untyped_storage(), 0)
        return total

    with pytest.raises(CaptureRefused, match="made before the capture and is freed inside it"):
        HostGraph(device).capture(function)
    assert torch.equal(x, torch.ones(1 << 12))


def test_empty_graph_does_not_replay() -> None:
    """Neither a graph without a capture, nor one that was reset, nor an empty one replays."""
    graph = HostGraph(Device("cpu"))
    with pytest.raises(RuntimeError, match="got an empty one"):
        graph.replay()
    x = torch.ones(2)
    graph.capture(lambda: x.add_(1))
    graph.reset()
    with pytest.raises(RuntimeError, match="got an empty one"):
        graph.replay()
    graph.capture(lambda: None)
    with pytest.raises(RuntimeError, match="got an empty one"):
        graph.replay()


def test_capture_restores_the_collector() -> None:
    """The garbage collector is off during a capture and as before after it."""
    x = torch.ones(2)
    inside, _ = HostGraph(Device("cpu")).capture(lambda: (gc.isenabled(), x + 1))
    assert not inside
    assert gc.isenabled()


def test_arena_is_no_larger_than_the_peak_of_live_temporaries() -> None:
    """A chain of equal temporaries replays in the memory that eager needs at its peak."""
    x, nbytes = torch.ones(1024), 4096
    device = Device("cpu")

    def chain() -> torch.Tensor:
        h = x
        for _ in range(20):
            h = h * 1.5 + 1
        return h.sum()

    with device.counting_memory():
        chain()
        peak = device.peak_bytes()
    # One value, its product, and their sum before it replaces the value.
    assert peak == 3 * nbytes
    graph = HostGraph(device)
    graph.capture(chain)
    assert graph.arena is not None
    assert graph.arena.numel() <= peak


ranges = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 20)).map(
        lambda r: (r[0], min(r[1:]), max(r[1:]))
    ),
    max_size=25,
)


@given(ranges)
@settings(max_examples=100, deadline=None)
def test_arena_plan(buffers: list[tuple[int, int, int]]) -> None:
    """Buffers alive together never overlap, all are aligned and inside, and reuse happens."""
    offsets, total = plan_arena(buffers)
    assert len(offsets) == len(buffers)
    for i, (nbytes, first, last) in enumerate(buffers):
        assert offsets[i] % 64 == 0
        assert 0 <= offsets[i] <= total - nbytes
        for j in range(i):
            other_bytes, other_first, other_last = buffers[j]
            if first <= other_last and other_first <= last and nbytes and other_bytes:
                apart = offsets[i] + nbytes <= offsets[j] or offsets[j] + other_bytes <= offsets[i]
                assert apart, (i, j)
    padded = [-(-nbytes // 64) * 64 for nbytes, _, _ in buffers]
    assert total <= sum(padded)
    if buffers:
        assert total >= max(nbytes for nbytes, _, _ in buffers)


State = dict[str, torch.Tensor]
Program = Callable[[State], Any]


def fresh_state() -> State:
    generator = torch.Generator().manual_seed(3)
    state = {
        "x": torch.randn(4, 6, generator=generator),
        "y": torch.randn(4, 6, generator=generator),
        "bf16": torch.randn(6, 6, generator=generator).bfloat16(),
        "index": torch.tensor([3, 0, 2], dtype=torch.int64),
        "empty": torch.zeros(0, 6),
        "out": torch.zeros(4, 6),
        "wide": torch.randn(8, 12, generator=generator),
        "count": torch.zeros((), dtype=torch.int64),
    }
    state["w"] = torch.randn(6, 6, generator=generator).requires_grad_()
    state["w"].grad = torch.zeros(6, 6)
    return state


def in_place(s: State) -> Any:
    s["x"].mul_(0.5).add_(s["y"], alpha=2)
    s["count"] += 1
    return s["x"].sum()


def out_argument(s: State) -> Any:
    torch.mul(s["x"], s["y"], out=s["out"])
    torch.cumsum(s["x"], 0, out=s["wide"][:4, ::2])
    return s["out"] + 1


def views(s: State) -> Any:
    s["wide"][2:6, 1:7].add_(s["x"])
    s["wide"].t()[3].zero_()
    first, second = s["wide"].chunk(2)
    return (first * second).view(2, -1), s["wide"].unfold(0, 2, 2).sum(-1)


def non_contiguous(s: State) -> Any:
    t = s["x"].t() * 3
    u = torch.empty_strided((6, 4), (1, 6)).copy_(t)
    return u, (t + u.t().t()).as_strided((3, 2), (2, 5), 1), s["wide"][::2, ::3].clone()


def foreach_lists(s: State) -> Any:
    torch._foreach_mul_([s["x"], s["y"]], 0.9)
    sums = torch._foreach_add([s["x"], s["wide"]], 1.0)
    norms = torch._foreach_norm(sums)
    torch._foreach_addcdiv_([s["out"]], [s["x"]], [s["y"].abs() + 1], 0.1)
    return sums, norms


def several_outputs(s: State) -> Any:
    values, indices = s["x"].topk(3, dim=1)
    variance, mean = torch.var_mean(s["wide"], dim=0)
    split = torch.split(s["wide"] * 2, [3, 5])
    return values, indices, variance, mean, split, torch.stack(torch.unbind(s["y"] + 1))


def zero_size(s: State) -> Any:
    s["empty"].add_(1)
    joined = torch.cat([s["empty"], s["x"]])
    return joined, s["empty"] @ s["w"].detach(), torch.zeros(3, 0).sum(1)


def indexing(s: State) -> Any:
    s["out"].index_add_(0, s["index"], s["x"][:3])
    s["out"].scatter_(1, s["index"][None].expand(4, 3), 7.0)
    return (
        s["x"][s["index"]],
        F.embedding(s["index"], s["wide"]),
        s["x"].gather(1, s["index"][None]),
    )


def mixed_dtypes(s: State) -> Any:
    low = s["x"].bfloat16() @ s["bf16"]
    return low, low.float().softmax(-1), s["x"].double().norm(), (s["x"] > 0).to(torch.int32).sum()


def complex_numbers(s: State) -> Any:
    z = torch.complex(s["x"], s["y"])
    return torch.view_as_real(z.conj() * z + z.imag), z.real.clone(), z.conj().imag + 1


def random_draws(s: State) -> Any:
    s["x"].add_(torch.randn(4, 6))
    return F.dropout(s["y"], 0.3), torch.rand(5), torch.randint(0, 9, (4,)), s["x"].bernoulli(0.5)


def random_in_place(s: State) -> Any:
    s["out"].normal_().clamp_(-1, 1)
    s["wide"].uniform_()
    return F.dropout(s["out"], 0.5, inplace=True)


def training(s: State) -> Any:
    loss = F.dropout((s["x"] @ s["w"]).relu(), 0.4).square().mean()
    loss.backward()
    assert s["w"].grad is not None
    with torch.no_grad():
        s["w"].sub_(s["w"].grad, alpha=0.1)
        s["w"].grad.zero_()
    return loss.detach()


def attention(s: State) -> Any:
    q = s["x"].view(1, 2, 4, 3)
    mixed = F.scaled_dot_product_attention(q, q * 0.5, q + 1, is_causal=True)
    return mixed, F.layer_norm(mixed, (3,)), F.cross_entropy(s["x"], s["index"].repeat(2)[:4] % 6)


def chained_temporaries(s: State) -> Any:
    h = s["x"]
    for _ in range(12):
        h = torch.tanh(h @ s["bf16"].float()) + s["y"]
    return h


PROGRAMS: list[Program] = [
    in_place, out_argument, views, non_contiguous, foreach_lists, several_outputs, zero_size,
    indexing, mixed_dtypes, complex_numbers, random_draws, random_in_place, training, attention,
    chained_temporaries,
]  # fmt: skip
REPLAYS = 4


def bits(value: Any) -> Any:
    """Everything in `value`, copied, as bytes: NaN, -0.0 and layout of values count."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return tuple(value.shape), value.dtype, plain.view(-1).view(torch.uint8).tolist()
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    assert value is None
    return None


def snapshot(state: State) -> Any:
    """Bits of all static tensors, their gradients and the generator."""
    grads = [tensor.grad for tensor in state.values()]
    return bits([*state.values(), *grads, torch.get_rng_state()])


def run_eager(program: Program, times: int) -> list[Any]:
    torch.manual_seed(11)
    state, seen = fresh_state(), []
    for _ in range(times):
        result = program(state)
        seen.append((bits(result), snapshot(state)))
    return seen


@pytest.mark.parametrize("counting", [False, True], ids=["plain", "counted"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_replay_is_bit_identical_to_eager(program: Program, counting: bool) -> None:
    """Results, static tensors and generator equal eager's after each of several replays."""
    expected = run_eager(program, REPLAYS)
    device = Device("cpu")
    if counting:
        with device.counting_memory():
            check_replays(device, program, expected)
            assert device.peak_bytes() > 0
    else:
        check_replays(device, program, expected)


def check_replays(device: Device, program: Program, expected: list[Any]) -> None:
    torch.manual_seed(11)
    state = fresh_state()
    before = snapshot(state)
    graph = HostGraph(device)
    result = graph.capture(lambda: program(state))
    assert snapshot(state) == before, "the capture left a trace"
    for step in range(REPLAYS):
        graph.replay()
        assert (bits(result), snapshot(state)) == expected[step], step


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_capture_that_raises_leaves_no_trace(program: Program) -> None:
    """An exception at the end of the function undoes all that it wrote, and passes through."""
    state = fresh_state()
    before = snapshot(state)

    def function() -> None:
        program(state)
        raise KeyError("mine")

    device = Device("cpu")
    with pytest.raises(KeyError, match="mine"):
        HostGraph(device).capture(function)
    assert snapshot(state) == before
    assert device.storage_watchers == ()
