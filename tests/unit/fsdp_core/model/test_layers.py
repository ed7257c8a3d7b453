"""The choice of module library, and torch's own RMSNorm and linear."""

import gc
import importlib.util
import math
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.device_graphs import HostGraph
from fsdp_core.model.batch import Capacity, Document, Part, pack, packed_part
from fsdp_core.model.decoder import make_layers
from fsdp_core.model.layers import (
    BackendMissing,
    FusedRope,
    LayerFactory,
    RmsNorm,
    RopeTable,
    apply_rope,
    rope_tables,
)
from fsdp_core.model.te import attention as te_attention
from fsdp_core.parallel.mesh import Axis
from tests.dist.te_stand_in import StandIn


def test_rms_norm_statistics_are_float32() -> None:
    """In bf16 only the result is rounded, no square and no sum."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = RmsNorm(64, 1e-5).bfloat16()
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected.bfloat16())


def test_torch_backend_makes_plain_modules() -> None:
    """The torch backend's linear has no bias, and its norm starts at one."""
    backend = make_layers("torch")
    assert isinstance(backend, LayerFactory)
    linear, norm = backend.linear(3, 5), backend.rms_norm(7, 1e-6)
    assert isinstance(linear, nn.Linear)
    assert dict(linear.named_parameters()).keys() == {"weight"}
    assert linear.weight.shape == (5, 3)
    assert isinstance(norm, RmsNorm)
    assert norm.weight.tolist() == [1.0] * 7


def test_te_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend te without its package says what to install or set."""
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "transformer_engine" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(
        BackendMissing, match="transformer-engine, which is not installed"
    ) as caught:
        make_layers("te")
    assert "backend: torch" in str(caught.value)


def test_te_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend te without a CUDA device is refused before the package is imported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendMissing, match="needs a CUDA device"):
        make_layers("te")


# --- rotary embedding: a rotation, whose inner products know only the distance --------------------


SEQ, HEADS, DIM = 48, 3, 16
CPU = torch.device("cpu")


def draw(seed: int) -> torch.Tensor:
    """One vector a head, the same at every position: float32 [1, SEQ, HEADS, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 1, HEADS, DIM, generator=generator).expand(1, SEQ, HEADS, DIM)


def test_tables() -> None:
    """Angles are position * theta^(-2i/d), to float32 rounding of the cosine and sine."""
    cos, sin = rope_tables(SEQ, DIM, 1000.0, CPU)
    assert cos.shape == sin.shape == (SEQ, DIM // 2)
    assert cos.dtype == sin.dtype == torch.float32
    for t in (0, 1, SEQ - 1):
        for i in (0, 3, DIM // 2 - 1):
            angle = t * 1000.0 ** (-2 * i / DIM)
            assert abs(cos[t, i].item() - math.cos(angle)) <= 2**-24
            assert abs(sin[t, i].item() - math.sin(angle)) <= 2**-24


def test_computes_in_float32() -> None:
    """A bf16 input is rotated in float32 and rounded once."""
    x = draw(4).bfloat16()
    tables = rope_tables(SEQ, DIM, 10_000.0, CPU)
    out = apply_rope(x, *tables)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rope(x.float(), *tables).bfloat16())


NUM, WIDTH, THETA = 64, 8, 1000.0


def table() -> RopeTable:
    return RopeTable(NUM, WIDTH, THETA)


def heads(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, length, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def addresses(rope: RopeTable) -> list[int]:
    return [rope.cos.data_ptr(), rope.sin.data_ptr()]


def test_looks_positions_up() -> None:
    """Any positions in any order, such as those of a context rank, turn each token by its own."""
    positions, x = torch.tensor([5, 0, 63, 5, 17]), heads(5)
    cos, sin = rope_tables(NUM, WIDTH, THETA, CPU)
    assert torch.equal(table()(x, positions), apply_rope(x, cos[positions], sin[positions]))


def test_casts_leave_it_in_float32() -> None:
    """A model in a narrower type still turns by angles of float32, from the same memory."""
    model = torch.nn.Sequential(table(), torch.nn.Linear(2, 2)).bfloat16().double().half()
    rope = model[0]
    assert isinstance(rope, RopeTable)
    assert model[1].weight.dtype == torch.float16
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    cos, sin = rope_tables(NUM, WIDTH, THETA, CPU)
    assert torch.equal(rope.cos, cos)
    assert torch.equal(rope.sin, sin)
    before = addresses(rope)
    model.to(torch.bfloat16)
    assert addresses(rope) == before


def test_comes_from_meta_with_its_values() -> None:
    """A model that is laid out on meta and then given memory has the angles, not what lay there."""
    with torch.device("meta"):
        rope = table()
    moved = rope.to("meta").to_empty(device="cpu")
    cos, sin = rope_tables(NUM, WIDTH, THETA, CPU)
    assert torch.equal(moved.cos, cos)
    assert torch.equal(moved.sin, sin)


def test_a_graph_reads_it_for_as_long_as_the_model_lives() -> None:
    """Replays follow new positions, after calls of other lengths that could have replaced it."""
    rope = table()
    x, positions = heads(16), torch.arange(16)
    graph = HostGraph(Device("cpu"))
    out = graph.capture(lambda: rope(x, positions))
    for seed in range(3):
        rope(heads(48, seed), torch.arange(48))
        gc.collect()
        positions.copy_(torch.randperm(NUM, generator=torch.Generator().manual_seed(seed))[:16])
        graph.replay()
        assert torch.equal(out, table()(x, positions))


def test_layers_share_it() -> None:
    """It is one table however many modules hold it, and moves once."""
    rope = table()
    model = torch.nn.ModuleList([torch.nn.ModuleList([rope]), torch.nn.ModuleList([rope])])
    assert len(list(model.buffers())) == 2
    model.to("meta")
    model.to_empty(device="cpu")
    assert torch.equal(rope.cos, rope_tables(NUM, WIDTH, THETA, CPU)[0])


def packed(tail: str, size: int, rank: int) -> Part:
    """Two sequences and a tail of 8 tokens, this rank's part."""
    capacity = Capacity(tokens=32, slots=4, multiple=4, hides_tail=tail == "hidden")
    documents = [Document(ids, ids) for ids in (torch.ones(9).long(), torch.ones(11).long())]
    return packed_part(
        pack(documents, capacity), Axis("cp", size, rank, cast("Any", None)), 1.0
    ).part


@pytest.mark.parametrize("tail", ["dummy", "hidden"])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("kernel", ["ours", "te"])
def test_a_fused_kernel_turns_what_offsets_tell_of(
    tail: str, size: int, rank: int, kernel: str
) -> None:
    """Valid tokens as by a look-up, to the bit, in both directions; no row is left as it was."""
    part = packed(tail, size, rank)
    assert part.packed is not None
    assert part.packed[1][-1] == (24 if tail == "hidden" else 32)
    rope = table()
    fused = FusedRope(NUM, WIDTH, THETA) if kernel == "ours" else te_rope()
    x = heads(32 // size)[:1]
    x, slope = (part.plan.blank(t) for t in (x, x.flip(0, 1)))
    found = []
    for each in (rope, fused):
        leaf = x.clone().requires_grad_()
        turned = each.turn(leaf, part)
        turned.backward(slope)
        assert leaf.grad is not None
        found.append((turned.detach(), leaf.grad))
    for looked_up, by_kernel in zip(*found, strict=True):
        torch.testing.assert_close(
            looked_up, by_kernel, rtol=0, atol=0 if kernel == "ours" else 1e-5
        )


@pytest.mark.parametrize("kernel", ["ours", "te"])
def test_a_fused_kernel_writes_no_row_behind_the_last_offset(kernel: str) -> None:
    """Nor its gradient: what is there may be anything, NaN too. Rows of one sequence are whole."""
    rope = FusedRope(NUM, WIDTH, THETA) if kernel == "ours" else te_rope()
    x, alone = heads(16)[:1].requires_grad_(), Axis("cp", 1, 0, cast("Any", None))
    turned = rope(x, torch.tensor([0, 8, 12], dtype=torch.int32), alone)
    turned.backward(torch.ones_like(turned))
    assert x.grad is not None
    for t in (turned, x.grad):
        assert t.isnan().flatten(2).all(-1)[0].tolist() == [False] * 12 + [True] * 4
    torch.testing.assert_close(rope(heads(16), None, alone), table()(heads(16), torch.arange(16)))


def te_rope() -> FusedRope:
    return te_attention.FusedRope(StandIn(fused_experts=False).te, NUM, WIDTH, THETA)
