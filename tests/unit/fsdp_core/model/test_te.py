"""What needs no TransformerEngine of its parts: token order, padded groups, joined gradients."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp_core.config import model_from_preset
from fsdp_core.model.decoder import make_layers
from fsdp_core.model.te import attention as core
from fsdp_core.model.te import layers as experts
from fsdp_core.model.te.attention import by_rank, by_sequence
from fsdp_core.model.te.layers import Scaling, amax_group
from fsdp_core.parallel.mesh import Axis
from tests.dist import te_stand_in as fp8
from tests.dist.parity_programs import single_axes
from tests.dist.te_stand_in import GroupedLinear, Linear, StandIn

TP = Axis("tp", 2, 0, cast("Any", None), cuts_sequence=True)


def test_order_under_sequence_parallel() -> None:
    """Ranks outermost and back: rank r's stretch of every sequence is in its place."""
    whole = torch.arange(3 * 4).view(3, 4)[..., None]
    ranks = torch.cat([whole[:, :2], whole[:, 2:]])
    assert torch.equal(by_sequence(ranks, TP), whole)
    assert torch.equal(by_rank(whole, TP), ranks)
    assert by_sequence(ranks, replace(TP, cuts_sequence=False)) is ranks


@pytest.mark.parametrize(
    ("counts", "multiple", "padded"),
    [
        ((3, 0, 5), 4, (4, 0, 8)),
        ((4, 8), 4, (4, 8)),
        ((0, 0), 16, (16, 0)),
        ((0, 0), 1, (1, 0)),
        ((2, 1), 1, (2, 1)),
    ],
)
def test_groups_are_padded_and_cut(
    counts: tuple[int, ...], multiple: int, padded: tuple[int, ...]
) -> None:
    """Rows stay with their group, the rest is zero, and gradients come back to the rows."""
    rows = torch.randn(sum(counts), 3, requires_grad=True)
    filled, sizes = experts.pad_groups(rows, counts, multiple)
    assert sizes == padded
    assert filled.shape == (sum(padded), 3)
    for mine, theirs in zip(rows.split(counts), filled.split(sizes), strict=True):
        assert torch.equal(theirs[: len(mine)], mine)
        assert not theirs[len(mine) :].any()
    back = experts.unpad_groups(filled, counts, sizes)
    assert torch.equal(back, rows)
    slope = torch.randn_like(rows)
    back.backward(slope)
    assert torch.equal(cast("Any", rows.grad), slope)


def test_gradients_of_one_allocation_are_not_copied() -> None:
    """Gradients that a kernel wrote one after another become the weight's as they lie."""
    packed = torch.randn(3, 2, 4)
    weight = torch.randn(3, 2, 4, requires_grad=True)
    views = experts.matrices(weight)
    places = [matrix.data_ptr() for matrix in weight.detach()]
    assert [view.data_ptr() for view in views] == places
    assert experts.joined(packed.unbind(0)).data_ptr() == packed.data_ptr()
    torch.autograd.backward(views, list(packed.unbind(0)))
    assert torch.equal(cast("Any", weight.grad), packed)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(2, 3), torch.zeros(2, 3)],
        [*reversed(torch.randn(2, 2, 3).unbind(0))],
        [*torch.randn(4, 2, 3)[::2].unbind(0)],
        [*torch.randn(2, 3, 2).transpose(1, 2).unbind(0)],
        [(whole := torch.randn(2, 2, 3))[0], whole[0]],
    ],
)
def test_other_gradients_are_joined_by_a_copy(parts: list[torch.Tensor]) -> None:
    """Memory in another order, with gaps, or shared, is stacked."""
    assert torch.equal(experts.joined(parts), torch.stack(parts))


def test_a_matrix_that_is_not_used_has_a_zero_gradient() -> None:
    """An expert without rows on any rank trains as one whose gradient is zero."""
    weight = torch.randn(3, 2, 4, requires_grad=True)
    experts.matrices(weight)[1].sum().backward()
    assert cast("Any", weight.grad).sum((1, 2)).tolist() == [0.0, 8.0, 0.0]


def test_operators_take_the_weights_of_now() -> None:
    """A fuser that was made without gradients, in evaluation, still trains; as the layers do."""
    config = model_from_preset("moe_tiny", {})
    grads = []
    for fused in (True, False):
        backend = StandIn(fused_experts=fused)
        made = backend.experts(config, single_axes())
        torch.manual_seed(2)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        rows = torch.randn(config.experts, 3, config.hidden)
        with torch.no_grad():
            made(rows, None)
        made(rows, None).square().sum().backward()
        grads.append([parameter.grad for parameter in made.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_what_layers_are_made_of() -> None:
    """Torch has no fp8 and fuses experts if told, te not in blocks; a rank alone has no group."""
    for backend, recipe, fused in (("torch", "current", False), ("te", "block", True)):
        with pytest.raises(ValueError, match=f"Expected fp8 none of backend {backend}, .*{recipe}"):
            make_layers(backend, fp8=recipe, fused_experts=fused)
    assert make_layers("torch").fused_experts is False
    assert make_layers("torch", fused_experts=True).fused_experts is True
    assert amax_group(single_axes()) is None


Manager = fp8.Manager


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Manager.reset()
    yield
    Manager.reset()


@pytest.fixture
def scaling() -> Scaling:
    te: Any = StandIn(fused_experts=False).te
    return Scaling(te, fp8.Delayed(), None)


def linear() -> Linear:
    made = Linear(16, 16, bias=False, params_dtype=torch.float32)
    nn.init.ones_(made.get_parameter("weight"))
    return made


def grouped() -> GroupedLinear:
    """Two, whose backward does not ask whether something is captured."""
    made = GroupedLinear(2, 16, 16, bias=False, params_dtype=torch.float32, device="cpu")
    for parameter in made.parameters():
        nn.init.ones_(parameter)
    return made


def run(module: nn.Module, *args: Any) -> None:
    module(torch.ones(4, 16, requires_grad=True), *args).sum().backward()


def scales(module: nn.Module) -> list[float]:
    return torch.cat([tensor.flatten() for tensor in fp8.states_of(module)]).tolist()


@pytest.mark.parametrize(("module", "args"), [(linear(), ()), (grouped(), ([2, 2],))])
def test_a_captured_part_moves_nothing(scaling: Scaling, module: nn.Module, args: Any) -> None:
    """Neither its end nor its backward moves scales; largest values are written, and put back."""
    put_back = scaling.remember(module)
    with scaling.captured():
        run(module, *args)
    assert Manager.moved == []
    assert Manager.registered == {}
    written = scales(module)
    put_back()
    after = scales(module)
    assert after != written
    assert set(after) == {0.0, 1.0}, "as a module begins"


def test_what_was_there_is_put_back(scaling: Scaling) -> None:
    """Scales and histories of steps before have their bits again, in their places."""
    module = linear()
    for _ in range(2):
        with scaling():
            out = module(torch.full((4, 16), 3.0, requires_grad=True)).sum()
        out.backward()
    assert Manager.moved == ["forward", "backward"] * 2
    before, places = scales(module), [t.data_ptr() for t in fp8.states_of(module)]
    put_back = scaling.remember(module)
    with scaling.captured():
        module(torch.full((4, 16), 50.0, requires_grad=True)).sum().backward()
    assert scales(module) != before
    put_back()
    assert scales(module) == before
    assert [t.data_ptr() for t in fp8.states_of(module)] == places


def test_replays_stand_in_for_modules(scaling: Scaling) -> None:
    """Modules register, and the first replay of an autocast moves scales after its backward."""
    modules = [linear(), linear()]
    for module in modules:
        with scaling.captured():
            run(module)
    first, second = (scaling.replays([module]) for module in modules)
    with scaling():
        after = first()
        assert second() is None
        assert [len(found) for found in Manager.registered.values()] == [2, 2]
    assert Manager.moved == ["forward"]
    assert after is not None
    after()
    assert Manager.moved == ["forward", "backward"]
    with scaling():
        run(modules[1])
        assert first() is None, "a module before it has the mark"


def test_operators_of_a_kernel_have_scales(scaling: Scaling) -> None:
    """Those of experts' operators, which are no modules of the model, are found by their."""
    state = fp8.RecipeState(3)
    operator = SimpleNamespace(_fp8_metas={"forward": {"scaling_fwd": state}, "backward": None})
    module = nn.Sequential(nn.Linear(1, 1))
    cast("Any", module[0]).kernel = SimpleNamespace(operators=(operator,))
    cast("Any", module).fp8_meta = {"scaling_fwd": SimpleNamespace()}
    named = {name: get() for name, get in scaling.state(module)}
    assert named.keys() == {f"0 operator 1 fp8 forward {n}" for n in ("scale", "amax_history")}
    assert named["0 operator 1 fp8 forward scale"] is state.scale


def test_sizes_on_the_device() -> None:
    """Equal sizes, as of padded experts, and others, as int64."""
    for sizes in ((3, 3, 3), (3, 0, 1), (4,)):
        found = experts._on_device(sizes, torch.device("cpu"))
        assert (found.tolist(), found.dtype) == (list(sizes), torch.int64)


@pytest.mark.parametrize(
    ("name", "supported", "asked", "fused"),
    [
        ("none", True, None, True),
        ("none", False, None, False),
        ("none", False, True, True),
        ("delayed", False, None, False),
        ("current", True, None, True),
        ("current", True, False, False),
        ("block", True, None, False),
    ],
)
def test_experts_are_fused_where_there_are_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, supported: bool, asked: bool | None, fused: bool
) -> None:
    """TransformerEngine is asked by recipe and dtype, unless the caller decides."""
    questions = []

    def support(recipe: Any, dtype: torch.dtype) -> bool:
        questions.append((recipe, dtype))
        return supported

    ops = SimpleNamespace(basic=SimpleNamespace(grouped_linear=SimpleNamespace(
        is_op_fuser_grouped_tensor_path_supported=support)))  # fmt: skip
    package, te = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    cast("Any", te).ops = ops
    cast("Any", package).pytorch = te
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(experts, "prefer_cudnn_of_torch", lambda: None)
    monkeypatch.setattr(experts, "recipe_of", lambda fp8: f"recipe {fp8}")
    made: Any = make_layers("te", fp8=name, fused_experts=asked, dtype=torch.float16)
    assert made.fused_experts is fused
    recipe = None if name == "none" else f"recipe {name}"
    assert questions in ([], [(recipe, torch.float16)])
    assert bool(questions) == (asked is None and name != "block")


@pytest.mark.parametrize(
    ("version", "length", "captures", "refused"),
    [
        (91500, 192, True, True),
        (91500, 192, False, False),
        (91500, 256, True, False),
        (91501, 192, True, False),
        (None, 192, True, False),
    ],
)
def test_attention_that_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, version: int | None, length: int, captures: bool, refused: bool
) -> None:
    """Lengths whose backward pass an older cuDNN cannot hold in a graph are refused in one."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    if not refused:
        core._require_capturable(length)
        return
    with pytest.raises(RuntimeError, match=r"multiple of 128 tokens.*got 192. Take cuDNN 9.15.1"):
        core._require_capturable(length)
