"""Kernels of attention blocks, and attention on a context axis of one rank."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.model.batch import Capacity, Document, pack
from fsdp_core.model.cp_attention import (
    BlockKernel,
    FlashKernel,
    Three,
    TorchKernel,
    causal_attention,
    kernel_for,
    merge,
)
from fsdp_core.parallel.context import ContextPlan, Spans, dense_plan
from fsdp_core.parallel.mesh import Axis
from tests.dist.parity_bounds import Bounded
from tests.dist.test_context_parallel import (
    RESULTS,
    SHAPES,
    Inputs,
    Shape,
    attention_with_bounds,
    draw,
    run_attention,
)

TIME = 24
CPU = torch.device("cpu")
LENGTHS = (5, 11, 0, 8)
ROWS = (slice(0, 5), slice(5, 16), slice(16, 24))
"""Where the sequences lie, the empty one left out."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture
def axis(mesh: DeviceMesh) -> Axis:
    return Axis("cp", 1, 0, mesh.get_group())


def run_kernel(
    kernel: BlockKernel, inputs: Inputs, spans: tuple[Spans, Spans], scale: float
) -> list[torch.Tensor]:
    """Causal attention and its gradients by one block, in the inputs' dtype."""
    q, k, v, grad = inputs
    out, lse = kernel.forward((q, k, v), spans, causal=True, scale=scale)
    kept = out.to(q.dtype)
    grads = kernel.backward(grad, (q, k, v), (kept, lse), spans, causal=True, scale=scale)
    return [kept, *(g.to(q.dtype) for g in grads)]


def bounds_of(inputs: Inputs, shape: Shape, rows: slice, **options: Any) -> dict[str, Bounded]:
    """The reference of one sequence: `rows` of the first row of the batch."""
    q, k, v, grad = (t[0, rows].double() for t in inputs)
    return attention_with_bounds(
        q, k, v, grad, scale=shape.width**-0.5, joins=0, dtype=inputs[0].dtype, **options
    )


def one_sequence(time: int = TIME) -> tuple[Spans, Spans]:
    return Spans(None, time), Spans(None, time)


def several_sequences() -> tuple[Spans, Spans]:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return Spans(offsets, TIME), Spans(offsets, TIME)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_torch_kernel_is_attention(name: str, dtype: torch.dtype) -> None:
    """Output and gradients of one sequence are off by rounding alone."""
    shape = SHAPES[name]
    inputs = draw(shape, 1, TIME, dtype)
    expected = bounds_of(inputs, shape, slice(None))
    got = run_kernel(TorchKernel(), inputs, one_sequence(), shape.width**-0.5)
    for result, tensor in zip(RESULTS, got, strict=True):
        assert expected[result].units(tensor[0]) <= 1.0, result


def test_sequences_of_a_row_do_not_see_each_other() -> None:
    """Each sequence has the attention it has alone; one of them is empty."""
    shape = SHAPES["gqa"]
    inputs = draw(shape, 1, TIME, torch.float64)
    got = run_kernel(TorchKernel(), inputs, several_sequences(), shape.width**-0.5)
    for rows in ROWS:
        expected = bounds_of(inputs, shape, rows)
        for result, tensor in zip(RESULTS, got, strict=True):
            assert expected[result].units(tensor[0, rows]) <= 1.0, result


@pytest.mark.parametrize("early", [1, 7, TIME - 1])
def test_late_queries_see_all_keys_before_them(early: int) -> None:
    """Queries and keys of a causal block end together, and joined blocks are the whole."""
    shape = SHAPES["mla"]
    q, k, v, grad = draw(shape, 1, TIME, torch.float64)
    scale, kernel = shape.width**-0.5, TorchKernel()
    late, spans = TIME - early, (Spans(None, TIME - early), Spans(None, TIME))
    expected = bounds_of((q, k, v, grad), shape, slice(None))["out"]
    rows = Bounded(expected.exact[early:], expected.bound[early:])

    out, lse = kernel.forward((q[:, early:], k, v), spans, causal=True, scale=scale)
    assert rows.units(out[0]) <= 1.0
    before = (spans[0], Spans(None, early))
    first = kernel.forward(
        (q[:, early:], k[:, :early], v[:, :early]), before, causal=False, scale=scale
    )
    own = kernel.forward(
        (q[:, early:], k[:, early:], v[:, early:]),
        (spans[0], Spans(None, late)),
        causal=True,
        scale=scale,
    )
    assert rows.units(merge(first, own)[0][0]) <= 1.0
    assert lse.shape == (1, late, shape.heads)


def test_joining_nothing_keeps_the_bits() -> None:
    """A block that has no key for a query, with a log-sum-exp of -inf, changes nothing of it."""
    generator = torch.Generator().manual_seed(0)
    one = (torch.randn(1, 5, 2, 3, generator=generator), torch.randn(1, 5, 2, generator=generator))
    nothing = (torch.zeros_like(one[0]), torch.full_like(one[1], -math.inf))
    for joined in (merge(one, nothing), merge(nothing, one)):
        for ours, theirs in zip(joined, one, strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank_has_the_bits_of_the_kernel(axis: Axis, dtype: torch.dtype) -> None:
    """On an axis of one rank outputs and gradients are the plain kernel's, dense and packed."""
    shape = SHAPES["gqa"]
    packed = pack(
        [Document(torch.arange(n), torch.arange(n)) for n in (6, 10, 8)],
        Capacity(tokens=TIME, slots=4, multiple=2),
    )
    cases: list[tuple[ContextPlan, tuple[Spans, Spans], int]] = [
        (dense_plan(TIME, 1, 0, CPU), one_sequence(), 2),
        (packed.plan(1, 0), (Spans(packed.padded_offsets, TIME),) * 2, 1),
    ]
    for plan, spans, batch in cases:
        inputs = draw(shape, batch, TIME, dtype)
        expected = run_kernel(TorchKernel(), inputs, spans, 1 / math.sqrt(shape.width))
        got = run_attention(inputs, plan, axis)
        for name, tensor in zip(RESULTS, expected, strict=True):
            assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


# --- FlashAttention, whose operators a stand-in plays on the CPU ------------------------------


def stand_in(calls: list[tuple[int, ...]]) -> tuple[Any, Any]:
    """Both operators as torch documents them: layouts, widths and dtypes are checked."""

    def block(q: torch.Tensor, cum: Any, longest: int) -> Spans:
        assert cum is None or (cum.dtype == torch.int32 and cum.is_contiguous())
        assert q.dim() == (4 if cum is None else 3)
        return Spans(cum, longest)

    def check(*tensors: torch.Tensor) -> None:
        widths = {t.shape[-1] for t in tensors}
        assert len(widths) == 1
        assert widths.pop() % 8 == 0
        assert all(t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in tensors)

    def batched(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t if t.dim() == 4 else t[None] for t in tensors]

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cum_q: Any, cum_k: Any,
        max_q: int, max_k: int, dropout: float, causal: bool, debug: bool, *, scale: float,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        check(q, k, v)
        calls.append((max_q, max_k))
        assert (dropout, debug) == (0.0, False)
        spans = (block(q, cum_q, max_q), block(k, cum_k, max_k))
        qkv = cast("Three", tuple(batched(q, k, v)))
        out, lse = TorchKernel().forward(qkv, spans, causal=causal, scale=scale)
        lse = lse.transpose(1, 2).contiguous()
        return out.to(q.dtype).view(*q.shape), (lse if q.dim() == 4 else lse[0]), q, q, q

    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float,
        causal: bool, rng: torch.Tensor, unused: torch.Tensor, *, scale: float,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        check(grad, q, k, v, out)
        assert lse.is_contiguous()
        assert (dropout, rng.dtype, unused.dtype) == (0.0, torch.uint64, torch.uint64)
        assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        spans = (block(q, cum_q, max_q), block(k, cum_k, max_k))
        qkv = cast("Three", tuple(batched(q, k, v)))
        grad, out, lse = (*batched(grad, out), lse if q.dim() == 4 else lse[None])
        grads = TorchKernel().backward(
            grad, qkv, (out, lse.transpose(1, 2)), spans, causal=causal, scale=scale
        )
        return tuple(g.to(q.dtype).view(*t.shape) for g, t in zip(grads, (q, k, v), strict=True))

    return forward, backward


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_flash_kernel_pads_and_lays_out(
    monkeypatch: pytest.MonkeyPatch, name: str, packed: bool
) -> None:
    """Through operators that take equal widths of a multiple of 8, every shape is attention."""
    calls: list[tuple[int, ...]] = []
    forward, backward = stand_in(calls)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    shape = SHAPES[name]
    inputs = draw(shape, 1, TIME, torch.bfloat16)
    spans = several_sequences() if packed else one_sequence()
    got = run_kernel(FlashKernel(), inputs, spans, shape.width**-0.5)
    for rows in ROWS if packed else (slice(0, TIME),):
        expected = bounds_of(inputs, shape, rows, kernel_dtype=torch.bfloat16)
        for result, tensor in zip(RESULTS, got, strict=True):
            assert expected[result].units(tensor[0, rows]) <= 1.0, result
    assert calls == [(TIME, TIME)]


def test_flash_kernel_never_tells_of_a_longest_query_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With that the operator would take every sequence to have a query, empty ones too."""
    calls: list[tuple[int, ...]] = []
    forward, backward = stand_in(calls)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    inputs = draw(SHAPES["mha"], 1, 1, torch.bfloat16)
    run_kernel(FlashKernel(), inputs, one_sequence(1), 1.0)
    assert calls == [(2, 2)]


def fake(width: int, *, cuda: bool, dtype: torch.dtype) -> torch.Tensor:
    return cast("torch.Tensor", SimpleNamespace(shape=(1, 2, 3, width), is_cuda=cuda, dtype=dtype))


@pytest.mark.parametrize(
    ("cuda", "dtype", "width", "value_width", "kernel"),
    [
        (True, torch.bfloat16, 192, 128, FlashKernel), (True, torch.float16, 256, 256, FlashKernel),
        (True, torch.float32, 64, 64, TorchKernel), (True, torch.bfloat16, 264, 64, TorchKernel),
        (True, torch.bfloat16, 64, 264, TorchKernel), (False, torch.bfloat16, 64, 64, TorchKernel),
    ],
)  # fmt: skip
def test_choice_of_a_kernel(
    cuda: bool, dtype: torch.dtype, width: int, value_width: int, kernel: type
) -> None:
    """FlashAttention on CUDA in half precision up to a width of 256, plain operators elsewhere."""
    q, v = (fake(w, cuda=cuda, dtype=dtype) for w in (width, value_width))
    assert type(kernel_for(q, v)) is kernel


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_compiled_attention_has_the_gradients_of_eager_attention(
    dtype: torch.dtype, axis: Axis
) -> None:
    """Bit for bit by the backend that runs torch's own operators; zeros are what torch 2.11 had."""
    torch.compiler.reset()
    plan = dense_plan(TIME, 1, 0, CPU)
    inputs = draw(SHAPES["gqa"], 1, TIME, dtype)
    eager = run_attention(inputs, plan, axis)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_attention(q, k, v, plan=plan, axis=axis)

    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    out = torch.compile(attention, backend="aot_eager", dynamic=False)(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3])
    results = zip(RESULTS, (out.detach(), *grads), strict=True)
    same = {name: torch.equal(got, eager[name]) for name, got in results}
    assert same == dict.fromkeys(RESULTS, True)
