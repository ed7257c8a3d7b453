"""The layer in one process: stages, host reads, and what it refuses."""

import copy
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fsdp_core.model.decoder import MoeLayer
from fsdp_core.model.layers import Mlp
from fsdp_core.model.moe.dispatcher import Groups
from fsdp_core.model.moe.experts import Experts, GroupedLinear
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.tensor_parallel import Cut, named_cuts, take
from tests.dist.parity_programs import moe_model
from tests.support.operators import Seeing

EXPERTS, HIDDEN, FFN = 4, 8, 12
READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class HostReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def layer(axes: Axes, **changes: Any) -> MoeLayer:
    config = moe_model(HIDDEN, EXPERTS, aux_loss=0.1, **changes)
    always = Mlp(HIDDEN, FFN, axes)
    experts = Experts(EXPERTS, HIDDEN, FFN, axes)
    made = MoeLayer(config, axes, experts, always).double()
    generator = torch.Generator().manual_seed(8)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(2, 3, HIDDEN, generator=generator).double().requires_grad_()


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_dropless_reads_the_host_once(alone: Axes, dispatcher: str) -> None:
    """Forward and backward of a dropless layer wait for the device at one place."""
    made, x = layer(alone, dispatcher=dispatcher), tokens()
    with HostReads() as reads:
        made(x).sum().backward()
    assert reads.seen == {"tolist": 1}


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_drop_and_pad_never_reads_the_host(alone: Axes, dispatcher: str) -> None:
    """With a capacity nothing waits for the device."""
    made = layer(alone, dispatcher=dispatcher, capacity_factor=1.0, expert_bias=True)
    valid = torch.tensor([[True, True, False], [True, True, True]])
    with HostReads() as reads:
        made(tokens(), valid).sum().backward()
        made.router.update_bias(0.1)
    assert not reads.seen


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_operators_do_not_count_experts(
    alone: Axes, monkeypatch: pytest.MonkeyPatch, dispatcher: str, factor: float | None
) -> None:
    """With 64 experts, most of them empty, a step is as many operators as with 8."""
    monkeypatch.setattr(GroupedLinear, "_is_grouped", lambda layer, rows: True)
    numbers = Counter[int]()
    for experts in (8, 64):
        config = moe_model(
            HIDDEN, experts, aux_loss=0.1, dispatcher=dispatcher, capacity_factor=factor
        )
        inner = Experts(experts, HIDDEN, FFN - 4, alone)
        made = MoeLayer(config, alone, inner, None)
        for parameter in made.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(8))
        with Seeing(lambda *_, experts=experts: numbers.update([experts])):
            made(tokens().float()).sum().backward()
    assert numbers[8] == numbers[64] > 0


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_no_tokens_at_all(alone: Axes, dispatcher: str, factor: float | None) -> None:
    """Nothing goes in, nothing comes out, and every gradient is zero."""
    made = layer(alone, dispatcher=dispatcher, capacity_factor=factor)
    y = made(tokens()[:, :0])
    assert y.shape == (2, 0, HIDDEN)
    y.sum().backward()
    for parameter in made.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_a_copy_is_a_layer_of_its_own(alone: Axes) -> None:
    """Process groups, which nothing can copy, are shared; weights, cuts and buffers are not."""
    group: Any = threading.Lock()
    cut = {name: replace(getattr(alone, name), group=group) for name in ("ep", "etp", "tp", "dp")}
    axes = replace(alone, **cut, dense_mesh=group, expert_mesh=group)
    made = layer(axes, expert_bias=True)
    copied, x = copy.deepcopy(made), tokens()
    assert torch.equal(made(x), copied(x))
    assert named_cuts(made) == named_cuts(copied)
    for mine, other in zip(made.parameters(), copied.parameters(), strict=True):
        mine.data.zero_()
        assert other.any()


# --- grouped linear layers: paths, cuts, hooks, and what they refuse ------------------------------


NUM, IN, OUT = 4, 16, 24


def groups(*counts: int) -> Groups:
    ends = torch.tensor(counts).cumsum(0).int()
    return Groups(counts, ends, (), (), None, None)


def linear(axes: Axes, dtype: torch.dtype, *, grouped: bool = False) -> GroupedLinear:
    layer: Any = GroupedLinear(NUM, IN, OUT, axes, cut_dim=1)
    layer._is_grouped = lambda rows: grouped
    generator = torch.Generator().manual_seed(1)
    layer.weight.data = torch.randn(NUM, OUT, IN, generator=generator).to(dtype)
    return cast("GroupedLinear", layer)


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, IN, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("counts", [(3, 0, 1, 2), (0, 0, 6, 0), (6, 0, 0, 0), (0, 0, 0, 0)])
def test_each_row_meets_its_experts_matrix(
    alone: Axes, grouped: bool, counts: tuple[int, ...]
) -> None:
    """Ragged groups, empty ones too: output and gradients; an unused expert's gradient is zero."""
    dtype = torch.float32
    layer, x = linear(alone, dtype, grouped=grouped), rows(dtype, sum(counts))
    out = layer(x, groups(*counts))
    expert_of_row = torch.arange(NUM).repeat_interleave(torch.tensor(counts))
    due = torch.einsum("ni,noi->no", x.double(), layer.weight.double()[expert_of_row])
    assert out.shape == (sum(counts), OUT)
    torch.testing.assert_close(out.double(), due, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(grad)
    assert layer.weight.grad is not None
    assert x.grad is not None
    expected = torch.zeros(NUM, OUT, IN, dtype=torch.float64)
    for row, expert in enumerate(expert_of_row.tolist()):
        expected[expert] += torch.outer(grad[row], x.detach()[row]).double()
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    for expert in range(NUM):
        assert layer.weight.grad[expert].any() == (counts[expert] > 0)


def test_a_kernel_that_leaves_empty_groups_alone(
    alone: Axes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unused expert's gradient is zero also where the grouped kernel does not write it."""
    kernel = F.grouped_mm

    def leaves_garbage(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = kernel(a, b, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(F, "grouped_mm", leaves_garbage)
    layer = linear(alone, torch.bfloat16, grouped=True)
    layer(rows(torch.bfloat16, 4), groups(3, 0, 1, 0)).sum().backward()
    assert layer.weight.grad is not None
    used = [bool(grad.any()) for grad in layer.weight.grad]
    assert used == [True, False, True, False]
    assert not layer.weight.grad.isnan().any()


def test_static_rows_are_the_same_product(alone: Axes) -> None:
    """[L, n, in] is one batched product."""
    layer, x = linear(alone, torch.float32), rows(torch.float32, NUM, 5)
    out = layer(x, None)
    due = torch.einsum("lni,loi->lno", x.double(), layer.weight.double())
    torch.testing.assert_close(out.double(), due, rtol=1e-5, atol=1e-5)
    # A sum's gradient is an expanded scalar, which the grouped kernel itself refuses.
    out.sum().backward()
    assert layer.weight.grad is not None
    column_sums = x.detach().sum(1)[:, None, :].expand(-1, OUT, -1)
    torch.testing.assert_close(layer.weight.grad, column_sums, rtol=1e-5, atol=1e-5)


def test_odd_widths_are_not_grouped(alone: Axes) -> None:
    """Rows of the kernel begin at multiples of 16 bytes; it has no float64."""
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, element_size=lambda: 2)
    wide = GroupedLinear(NUM, IN, OUT, alone, cut_dim=1)
    assert wide._is_grouped(on_gpu)
    assert not GroupedLinear(NUM, IN, 12, alone, cut_dim=1)._is_grouped(on_gpu)
    on_gpu.dtype = torch.float64
    assert not wide._is_grouped(on_gpu)


def test_parameters_know_their_cuts(alone: Axes) -> None:
    """Experts are cut over ep, their width over etp: dim 1 of gate and up, dim 2 of down."""
    axes = replace(
        alone, ep=replace(alone.ep, size=2, rank=1), etp=replace(alone.etp, size=4, rank=3)
    )
    experts = Experts(NUM, IN, OUT, axes)
    shapes = {"gate": (2, OUT // 4, IN), "up": (2, OUT // 4, IN), "down": (2, IN, OUT // 4)}
    for name, shape in shapes.items():
        weight = getattr(experts, name).weight
        assert weight.shape == shape
        assert weight.isnan().all()
        dim = 2 if name == "down" else 1
        cuts = (Cut("ep", 0, 2, 1), Cut("etp", dim, 4, 3))
        assert named_cuts(experts)[f"{name}.weight"] == cuts
        whole = (NUM, IN, OUT) if name == "down" else (NUM, OUT, IN)
        assert take(torch.empty(whole), cuts).shape == shape
    with pytest.raises(AssertionError, match="of an expert 6 over 4 ranks of etp"):
        Experts(NUM, IN, 6, axes)


def test_hooks_of_the_layers_run(alone: Axes) -> None:
    """It calls the three layers as modules: a gather in a hook is never bypassed."""
    experts = Experts(NUM, IN, OUT, alone)
    for parameter in experts.parameters():
        parameter.data.fill_(0.125)
    seen: list[str] = []
    for name, layer in experts.named_children():
        layer.register_forward_pre_hook(lambda *_, name=name: seen.append(f"before {name}"))
        layer.register_forward_hook(lambda *_, name=name: seen.append(f"after {name}"))
    out = experts(torch.ones(NUM, 2, IN), None)
    inner = F.silu(torch.tensor(IN * 0.125)) * IN * 0.125
    torch.testing.assert_close(out, torch.full_like(out, OUT * 0.125) * inner)
    assert sorted(seen) == sorted(f"{w} {n}" for w in ("before", "after") for n in experts._modules)
